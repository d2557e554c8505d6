"""Ranks of torchrun serve rank 0. Torchrun is not needed: here its processes are started with its environment."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from worker_helpers import SECONDS

from asyncpipe.errors import OptionError
from asyncpipe.runtime.workers.launcher import PlannedWorker
from asyncpipe.runtime.workers.torchrun import Rank, RankHere
from asyncpipe.runtime.workers.torchrun_workers import TorchrunWorkers

HELPERS = Path(__file__).parents[2] / "support"
SCRIPT = """
import asyncio, json, os, sys, time
from pathlib import Path
from asyncpipe import TorchrunWorkers
from worker_helpers import Recorded

assert sys.argv[1:] in (["argument"], [])


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def agent(pid):
    # Between an agent and its workers is what these are forked from.
    return parent(parent(pid))


async def main():
    told = {"controller": os.getpid()}
    recorded = Recorded(launcher=TorchrunWorkers(environment={"MINE": "too"}))
    devices = {"a": ("cpu:0",), "b": ("cuda:0",), "c": ("cuda:0",)}
    async with recorded.group as group:
        workers = await group.start("a", "b", "c", devices=devices)
        told["agents"] = [agent(worker.pid) for worker in workers]
        told["seen"] = [(await each.ask(("facts",)))["environment"] for each in workers]
        told["seen"] = [{name: each.get(name) for name in ("CUDA_VISIBLE_DEVICES", "MINE", "ASYNCPIPE_SECRET")}
                        for each in told["seen"]]
        workers[0].send(("exit", 5, "last words"))
        loss = await recorded.loss()
        told["loss"] = [loss.worker, loss.exit_status, loss.stderr]
        (again,) = await group.start("a", devices=devices)
        told["again"] = agent(again.pid)
    async with Recorded(launcher=TorchrunWorkers()).group as group:
        (worker,) = await group.start("d", devices={"d": ("cpu:0",)})
        told["second pool"] = agent(worker.pid)
        print(json.dumps(told), flush=True)
        if "HANGS" in os.environ:
            time.sleep(1000)


asyncio.run(main())
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


class Ranks:
    """Three of them: two of one host and one of another, if ``hosts`` is 2. All of them are of this machine."""

    def __init__(self, folder, hosts=1, module=True, **environment):
        script = folder / "script.py"
        script.write_text(SCRIPT)
        by = ["-m", "asyncpipe.worker", str(script), "argument"] if module else [str(script)]
        own = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "ASYNCPIPE_CONTROL_PORT": str(free_port()),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": str(3 // hosts),
            "TORCHELASTIC_RUN_ID": f"test/{os.getpid()}",
            "PYTHONPATH": os.pathsep.join([str(HELPERS), *filter(None, sys.path)]),
            "CUDA_VISIBLE_DEVICES": "4,6",
            "TMPDIR": tempfile.gettempdir(),
            **environment,
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, *by],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in (1, 0, 2)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.communicate()

    def ends(self):
        """The status and the outputs of each; rank 0 is the second."""
        found = [process.communicate(timeout=SECONDS) for process in self.processes]
        return [(process.returncode, *texts) for process, texts in zip(self.processes, found, strict=True)]


@pytest.mark.parametrize(("hosts", "module"), [(1, True), (2, False)])
def test_ranks_serve_one_pool_after_the_other_and_end_with_rank_0(tmp_path, hosts, module):
    with Ranks(tmp_path, hosts, module, **({"ASYNCPIPE_SECRET": "s" * 16} if hosts > 1 else {})) as ranks:
        first, controller, last = ranks.ends()
        assert (controller[0], controller[2]) == (0, "")
        assert (first, last) == ((0, "", "last words"), (0, "", ""))
        told = json.loads(controller[1])
        pids = {"first": ranks.processes[0].pid, "last": ranks.processes[2].pid}
        assert told["agents"] == [pids["first"], pids["first"], pids["last"]], "neighbours are together"
        seen = [{"CUDA_VISIBLE_DEVICES": each, "MINE": "too", "ASYNCPIPE_SECRET": None} for each in ("", "4", "6")]
        assert told["seen"] == seen
        assert told["loss"] == ["a", 5, "last words"]
        assert (told["again"], told["second pool"]) == (pids["first"], pids["first"])
    assert not list(Path(tempfile.gettempdir()).glob("asyncpipe-torchrun-*/*"))


def test_several_hosts_need_a_secret(tmp_path):
    with Ranks(tmp_path, hosts=2) as ranks:
        for status, out, err in ranks.ends():
            assert status
            assert out == ""
            assert "set the environment variable ASYNCPIPE_SECRET to one text of 16 letters or more on all" in err


def test_without_torchrun_it_says_how_to_start():
    with pytest.raises(OptionError, match="lacks 'RANK'; start the program by torchrun"):
        Rank.of_this_process({})
    done = subprocess.run(
        [sys.executable, "-m", "asyncpipe.worker", "train", "job.toml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "usage: torchrun" in done.stderr


async def test_devices_have_places_on_the_hosts_that_they_name(monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29512")
    here = [RankHere(1, "a.example", None), RankHere(2, "b", None), RankHere(3, "b", None)]

    class Met:
        address = "127.0.0.1"
        own = Rank.of_this_process()

        def all_here(self, seconds):
            return here

    monkeypatch.setattr("asyncpipe.runtime.workers.torchrun_workers.rendezvous", lambda own: Met())
    launcher = TorchrunWorkers()
    named = [PlannedWorker(name, (name,)) for name in ("b/cuda:3", "a/cuda:1", "b/cpu:0", "b/cpu:1")]
    await launcher.prepare(named)
    ranks = {"b/cuda:3": (2, (3,)), "a/cuda:1": (1, (1,)), "b/cpu:0": (2, ()), "b/cpu:1": (3, ())}
    assert launcher.seats == {name: (f"rank {rank}", accelerators) for name, (rank, accelerators) in ranks.items()}
    for workers, message in (
        (
            [PlannedWorker("c/cpu:0", ("c/cpu:0",))],
            "no rank that serves is on host c; torchrun .* on a.example, b",
        ),
        ([PlannedWorker("w", ("a/cpu:0", "b/cpu:0"))], "on several hosts"),
        (
            [PlannedWorker("w", ("a/cpu:0",)), PlannedWorker("v", ("cpu:0",))],
            "'a/cpu:0' names a host, and 'cpu:0'",
        ),
    ):
        with pytest.raises(OptionError, match=message):
            await launcher.prepare(workers)
