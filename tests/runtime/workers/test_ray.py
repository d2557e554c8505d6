"""Workers on real Ray, where it is installed, which takes some seconds to start. Both ends of the range of versions::

pip install --target FOLDER 'ray==2.40.0'        # and the newest
PYTHONPATH=FOLDER python -m pytest tests/runtime/workers/test_ray.py
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from worker_helpers import Recorded, folders, is_there, until

from asyncpipe.errors import LauncherError
from asyncpipe.runtime.workers.ray_workers import RayWorkers

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

TWO_NODES = """
import sys
from ray.cluster_utils import Cluster

out, sys.stdout = sys.stdout, sys.stderr
store = {"object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **store})
other = cluster.add_node(num_cpus=2, **store)
print(cluster.address, file=out, flush=True)
if sys.stdin.readline():
    cluster.remove_node(other, allow_graceful=False)
    print("removed", file=out, flush=True)
    sys.stdin.read()
cluster.shutdown()
"""


def rays():
    """Numbers of the processes of Ray's that this one has started, and those that they have."""
    found = {os.getpid()}
    while True:
        parents = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            return found - {os.getpid()}
        found |= more


async def test_ray_of_our_own_ends_with_the_pool_and_changes_nothing_here(capfd, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.255.255.1:1")  # A cluster that nobody has asked for.
    handlers = {each: signal.getsignal(each) for each in signal.Signals}
    hook, caught = sys.excepthook, caught_signals()
    before = rays()
    recorded = Recorded(launcher=RayWorkers())
    async with recorded.group as group:
        one, other = await group.start("one", "other", devices={"one": ("a/cpu:0",), "other": ("a/cpu:1",)})
        assert await one.ask(("echo", 1)) == 1
        os.kill(one.pid, signal.SIGKILL)
        loss = await recorded.loss()
        assert (loss.worker, loss.exit_status) == ("one", -signal.SIGKILL)
        (one,) = await group.start("one", devices={"one": ("a/cpu:0",)})
        other.send(("exit", 3, "last words"))
        loss = await recorded.loss()
        assert (loss.worker, loss.exit_status, loss.stderr) == ("other", 3, "last words")
        started = rays() - before
        assert len(started) > 4
    await until("all that Ray has started has ended", lambda: not any(map(is_there, started)))
    assert not folders()
    assert "ray" not in sys.modules
    assert {each: signal.getsignal(each) for each in signal.Signals} == handlers
    assert caught_signals() == caught
    assert sys.excepthook is hook
    assert capfd.readouterr() == ("", "")


async def test_hosts_of_a_cluster_have_bundles_and_one_may_be_lost(capfd):
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", TWO_NODES]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as cluster:  # noqa: ASYNC220
        address = cluster.stdout.readline().strip()
        recorded = Recorded(launcher=RayWorkers(address, seconds=20))
        async with recorded.group as group:
            devices = {"a": ("a/cpu:0",), "b": ("b/cpu:0",)}
            a, b = await group.start("a", "b", devices=devices)
            raylets = {parent(parent(parent(each.pid))) for each in (a, b)}
            assert len(raylets) == 2
            cluster.stdin.write("lose one\n")
            cluster.stdin.flush()
            loss = await recorded.loss()
            assert loss.worker in devices
            assert len(group.workers) == 1
            assert cluster.stdout.readline() == "removed\n"
        # What is there is for one host alone.
        launcher = RayWorkers(address, seconds=3)
        with pytest.raises(LauncherError, match=r"no room for 2 bundles of its own machine within 3 s.* machines"):
            async with Recorded(launcher=launcher).group as group:
                await group.start("a", "b", devices=devices)
        cluster.stdin.close()
    with pytest.raises(LauncherError, match="cannot be reached at"):
        async with Recorded(launcher=RayWorkers("127.0.0.1:1")).group as group:
            await group.start("a")


def caught_signals():
    return Path("/proc/self/status").read_text().split("SigCgt:")[1].split()[0]


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
