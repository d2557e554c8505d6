"""Workers on real Ray, where it is installed, which takes some seconds to start. Both ends of the range of versions::

pip install --target FOLDER 'ray==2.40.0'        # and the newest
PYTHONPATH=FOLDER python -m pytest tests/runtime/workers/test_ray.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from resume_helpers import disturb, make_job
from run_helpers import Told, assert_same_end, plain
from worker_helpers import SECONDS, Recorded, folders, is_there, until

from asyncpipe.errors import LauncherError
from asyncpipe.runtime.workers.ray_workers import RayWorkers
from asyncpipe.train.lasting_run import LastingRun
from tests.campaigns.crashes.left import child_named

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

REMOVED = {None, "REMOVED"}
TWO_NODES = """
import json, sys
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table

def groups():
    return {each["name"]: each["state"] for each in placement_group_table().values()}

out, sys.stdout = sys.stdout, sys.stderr
store = {"object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **store})
other = cluster.add_node(num_cpus=2, **store)
ray.init(cluster.address, log_to_driver=False)
print(cluster.address, file=out, flush=True)
for line in sys.stdin:
    print(json.dumps(eval(line)), file=out, flush=True)
ray.shutdown()
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


async def test_ray_of_our_own_ends_with_the_pool_and_changes_nothing_here(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", "10.255.255.1:1")  # A cluster that nobody has asked for.
    monkeypatch.setenv("HOME", str(tmp_path))
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
    assert not any(tmp_path.iterdir())  # A token there would be every later cluster's.
    assert "ray" not in sys.modules
    assert {each: signal.getsignal(each) for each in signal.Signals} == handlers
    assert caught_signals() == caught
    assert sys.excepthook is hook
    assert capfd.readouterr() == ("", "")


async def test_a_job_goes_on_bit_equal_behind_a_driver_that_was_killed(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("the user's own")

    def strike(step):
        if step == 3 and not killed:
            workers = [os.pidfd_open(child_named(each)) for each in ("cpu:0", "cpu:1")]
            killed.append(child_named("Ray driver of linear"))
            os.kill(killed[0], signal.SIGKILL)
            for each in workers:  # The job has few steps left.
                assert select.select([each], [], [], SECONDS)[0]
                os.close(each)

    killed, told = [], Told(strike)
    options = {"training": {"overlap": True, "clip": None}, "faults": {"step_retries": 0, "lost_host": "wait"}}
    job = make_job(tmp_path / "struck", **options).override("pipeline", workers="ray")
    disturb()
    summary = await LastingRun(job, plain, progress=told).run()
    said = [line for line in caplog.messages if line.startswith("the Ray driver of ")]
    assert said == [
        f"the Ray driver of linear (process {killed[0]}) was killed by SIGKILL; it was started again, and its agents "
        "start with it"
    ]
    assert token.read_text() == "the user's own"
    disturb()
    alone = await LastingRun(make_job(tmp_path / "alone", **options), plain).run()
    assert_same_end(alone.snapshot, summary.snapshot)


async def test_hosts_of_a_cluster_have_bundles_and_one_may_be_lost(caplog):
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", TWO_NODES]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as cluster:  # noqa: ASYNC220

        def answer(question):
            print(question, file=cluster.stdin, flush=True)
            return json.loads(cluster.stdout.readline())

        async def gone(*groups):
            await until("Ray has removed groups", lambda: {answer("groups()").get(each) for each in groups} <= REMOVED)

        address = cluster.stdout.readline().strip()
        recorded = Recorded(launcher=RayWorkers(address, seconds=20, name="here"))
        async with recorded.group as group:
            devices = {"a": ("a/cpu:0",), "b": ("b/cpu:0",)}
            await group.start("a", "b", devices=devices)
            first = answer("[each['name'] for each in ray.util.list_named_actors(all_namespaces=True)]")
            (reserved,) = answer("groups()")
            assert re.fullmatch("asyncpipe/here/[0-9a-f]{8}/group 0", reserved)
            own = reserved.removesuffix("group 0")
            assert {each.rpartition("/")[0] for each in first} == {f"{own}agent 0 of a", f"{own}agent 1 of b"}
            # The driver is lost, with all that it has started and reserved.
            os.kill(child_named("Ray driver of here"), signal.SIGKILL)
            assert {(await recorded.loss()).worker for _ in devices} == {*devices}
            a, b = await group.start("a", "b", devices=devices)
            assert [line.partition(" (")[0] for line in caplog.messages] == ["the Ray driver of here"]
            await gone(reserved)
            raylets = {parent(parent(parent(each.pid))) for each in (a, b)}
            assert len(raylets) == 2
            assert answer("cluster.remove_node(other, allow_graceful=False)") is None
            loss = await recorded.loss()
            assert loss.worker in devices
            assert len(group.workers) == 1
        # What is there is for one host alone.
        launcher = RayWorkers(address, seconds=3)
        with pytest.raises(LauncherError, match=r"no room for 2 bundles of its own machine within 3 s.* machines"):
            async with Recorded(launcher=launcher).group as group:
                await group.start("a", "b", devices=devices)
        await gone(*answer("groups()"))
        # A group that somebody else has made, by its id and by its name.
        key = answer("placement_group([{'CPU': 1}], name='theirs').id.hex()")
        for name in (key, "theirs"):
            async with Recorded(launcher=RayWorkers(address, placement_group=name)).group as group:
                (a,) = await group.start("a", devices=devices)
                assert await a.ask(("echo", name)) == name
                with pytest.raises(LauncherError, match="no bundle left for b, which needs"):
                    await group.start("b", devices=devices)
        assert [name for name, state in answer("groups()").items() if state == "CREATED"] == ["theirs"]
        for wrong, why in (("other", "0 groups of this name or id; there are: .*theirs"), ("theirs", "no bundle left")):
            launcher = RayWorkers(address, placement_group=wrong, resources={"disk": 1})
            with pytest.raises(LauncherError, match=f"placement group '{wrong}' .*{why}"):
                async with Recorded(launcher=launcher).group as group:
                    await group.start("a", devices=devices)
        cluster.stdin.close()
    with pytest.raises(LauncherError, match="cannot be reached at"):
        async with Recorded(launcher=RayWorkers("127.0.0.1:1")).group as group:
            await group.start("a")


def caught_signals():
    return Path("/proc/self/status").read_text().split("SigCgt:")[1].split()[0]


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
