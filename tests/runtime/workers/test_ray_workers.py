"""Workers on a cluster: what is asked of Ray, and what agents do. Ray itself is not needed; ``test_ray.py`` has it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib.util
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from worker_helpers import SECONDS, Recorded, is_alive, is_there, until

from asyncpipe.errors import LauncherError, OptionError
from asyncpipe.runtime.workers import ray_workers
from asyncpipe.runtime.workers.launcher import PlannedWorker
from asyncpipe.runtime.workers.ray_workers import RayDriver, RayWorkers
from asyncpipe.worker.ray_driver import _AgentActor
from tests.campaigns.crashes.left import child_named


class Cluster:
    """In the place of ``RayDriver``: two machines, which are this one. Actors are threads."""

    def __init__(self):
        self.here = "10.0.0.1"
        self.nodes = [
            {"name": "10.0.0.1", "hostname": "first", "address": "10.0.0.1"},
            {"name": "big", "hostname": "second", "address": "10.0.0.1"},
        ]
        self.opened, self.reserved, self.started = [], [], []
        self.bundles, self.environment = [], {}
        self.lost = None
        self.closed = 0
        self.threads = []

    async def ask(self, do, **arguments):
        if do == "open":
            if arguments["address"] == "nowhere":
                raise LauncherError("ConnectionError: no answer")
            self.opened.append(arguments)
            return {"nodes": self.nodes, "here": self.here}
        if do == "find":
            self.opened.append(arguments)
            return self.bundles
        if do == "start":
            run = {name: arguments.pop(name) for name in ("line", "program", "environment")}
            self.started.append(arguments)
            self.threads.append(_AgentThread(run))
            return await self.threads[-1].ended
        if do == "kill":
            return None
        if len(arguments["bundles"]) > len(self.nodes):
            raise LauncherError("RuntimeError: 2 machines")
        self.reserved.append(arguments)
        return len(self.reserved) - 1

    async def close(self):
        self.closed += 1
        for thread in self.threads:
            await asyncio.to_thread(thread.join)


class _AgentThread(threading.Thread):
    def __init__(self, run):
        super().__init__()
        self._run_of_agent, self._future = run, concurrent.futures.Future()
        self.ended = asyncio.wrap_future(self._future)
        self.start()

    def run(self):
        self._future.set_result(_AgentActor().run(**self._run_of_agent))


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.fixture
def drivers(monkeypatch):
    """Those that are made one after the other."""
    drivers = [Cluster() for _ in range(3)]
    left = list(drivers)

    def make(name, environment):
        left[0].environment = environment
        return left.pop(0)

    monkeypatch.setattr(ray_workers, "RayDriver", make)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,7")
    return drivers


@pytest.fixture
def cluster(drivers):
    return drivers[0]


async def test_agents_start_workers_in_their_bundles_and_say_how_they_end(cluster, capfd, monkeypatch):
    monkeypatch.setenv("RAY_SETTING", "is for Ray")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    launcher = RayWorkers(environment={"MINE": "too"}, resources={"disk": 1})
    recorded = Recorded(launcher=launcher)
    devices = {"a": ("here/cuda:1",), "b": ("there/cpu:0",), "c": ("here/cuda:4", "here/cuda:4#1")}
    async with recorded.group as group:
        a, b, c = await group.start("a", "b", "c", devices=devices)
        bundles = [{"asyncpipe": 2, "GPU": 2, "disk": 1}, {"asyncpipe": 1, "disk": 1}]
        assert [(each["bundles"], each["strategy"]) for each in cluster.reserved] == [(bundles, "STRICT_SPREAD")]
        assert sorted((each["bundle"], each["needs"]) for each in cluster.started) == [*enumerate(bundles)]
        assert {each["name"] for each in cluster.started} == {"agent 0 of here", "agent 1 of there"}
        facts = [(await worker.ask(("facts",)))["environment"] for worker in (a, b, c)]
        assert [each["CUDA_VISIBLE_DEVICES"] for each in facts] == ["5", "", "3"]
        assert all((each["MINE"], each["OMP_NUM_THREADS"]) == ("too", "3") for each in facts)
        assert all(each["CUDA_LAUNCH_BLOCKING"] == "1" for each in facts)
        assert not any("RAY_SETTING" in each for each in facts)
        assert all(worker.has_own_accelerators and worker.batches is None for worker in (a, b, c))
        # Between an agent and its workers is what these are forked from.
        agents = [parent_of(parent_of(worker.pid)) for worker in (a, b, c)]
        assert agents[0] == agents[2] != agents[1]
        # A worker ends: it takes its place again, without a bundle more.
        a.send(("exit", 7, "last words"))
        loss = await recorded.loss()
        assert (loss.worker, loss.exit_status, loss.stderr) == ("a", 7, "last words")
        b.kill("this is a test")
        loss = await recorded.loss()
        assert (loss.worker, loss.exit_status) == ("b", -signal.SIGKILL)
        (a, b) = await group.start("a", "b", devices=devices)
        assert len(cluster.reserved) == 1
        # An agent ends: all its workers do, at once.
        os.kill(agents[0], signal.SIGKILL)
        losses = [await recorded.loss() for _ in range(2)]
        assert {loss.worker for loss in losses} == {"a", "c"}
        (a,) = await group.start("a", devices=devices)
        assert await a.ask(("echo", "again")) == "again"
        assert [each["bundle"] for each in cluster.started[2:]] == [0]
        assert cluster.started[2]["group"] == 0
        # More of a later pipeline, on the same host.
        (d,) = await group.start("d", devices={"d": ("cpu:9",)})
        assert cluster.reserved[1]["bundles"] == [{"asyncpipe": 1, "disk": 1}]
        pids = [worker.pid for worker in (a, b, d)]
        assert all(map(is_alive, pids))
    assert not any(map(is_there, pids))
    assert cluster.closed == 1


@pytest.mark.parametrize(
    ("arguments", "devices", "message"),
    [
        ({}, [("a/cpu:0", "b/cpu:0")], "the devices of worker 'w0' are on several hosts"),
        ({}, [("a/cpu:0",), ("cpu:0",)], "'a/cpu:0' names a host, and 'cpu:0' does not"),
        (
            {},
            [("first/cpu:0",), ("frist/cpu:0",)],
            "has no host frist; it has 10.0.0.1, big, first, second",
        ),
        (
            {},
            [("a/cpu:0",), ("b/cpu:0",), ("c/cpu:0",)],
            r"no room for 3 bundles of its own .*\(a: .*2 ma",
        ),
        ({"placement": "device"}, [("a/cpu:0",)], "with placement='device' Ray chooses it"),
        ({"address": "nowhere"}, [("cpu:0",)], "Ray cannot be reached at 'nowhere': ConnectionError: no answer"),
        (
            {"address": "auto", "placement_group": "mine"},
            [("a/cpu:0",), ("b/cpu:0",)],
            r"Ray's placement group 'mine' has no bundle left for b, which needs {'CPU': 1.0}; unused are \[{'GPU'",
        ),
    ],
)
async def test_what_cannot_be_placed_says_so(cluster, arguments, devices, message):
    cluster.bundles = [{"CPU": 1.0, "node:10.0.0.1": 1.0}, {"GPU": 4.0, "node:10.0.0.1": 1.0}]
    launcher = RayWorkers(**arguments)
    with pytest.raises((OptionError, LauncherError), match=message):
        await launcher.prepare([PlannedWorker(f"w{number}", each) for number, each in enumerate(devices)])
    await launcher.close()
    assert cluster.closed == 1
    assert not cluster.started


def planned(**devices):
    return [PlannedWorker(name, (device,)) for name, device in devices.items()]


@pytest.mark.parametrize("group", ["ab12", SimpleNamespace(id=bytes.fromhex("ab12"))], ids=["name or id", "object"])
async def test_workers_take_the_bundles_of_a_placement_group_that_is_there(cluster, group):
    node = {"node:10.0.0.1": 1.0}
    cluster.bundles = [{"CPU": 2.0, **node}, {"CPU": 1.0, "GPU": 1.0, **node}, {"CPU": 1.0, **node}]
    cluster.nodes[1]["address"] = "10.0.0.2"  # It has no part of the group, so nobody there connects to this machine.
    launcher = RayWorkers("auto", placement="device", placement_group=group)
    await launcher.prepare(planned(a="cpu:0", b="cuda:0"))
    await launcher.prepare(planned(b="cuda:0", c="cpu:1"))
    assert (cluster.opened[1]["group"], cluster.reserved) == ("ab12", [])
    places = launcher._actors.places  # Agents that start there show it, too, and take seconds.
    assert {name: (each.group, each.bundle) for name, each in places.items()} == {
        "agent 0 of a": (0, 2),
        "agent 1 of b": (0, 1),
        "agent 2 of c": (0, 0),
    }
    await launcher.close()


async def test_in_the_place_of_a_lost_driver_starts_another_that_reserves_the_same(drivers, caplog):
    before, full, after = drivers
    full.nodes = []
    launcher = RayWorkers(name="charlm")
    await launcher.prepare(planned(a="one/cpu:0", b="other/cpu:0"))
    await launcher.prepare(planned(c="other/cpu:1"))
    places = dict(launcher._actors.places)
    before.lost = "Ray driver of charlm (process 12) was killed by SIGKILL"
    with pytest.raises(LauncherError, match=r"cannot be started again: .* no room for 2 bundles .*one: "):
        await launcher.prepare(planned(b="other/cpu:0"))
    await launcher.prepare(planned(b="other/cpu:0"))
    assert (full.reserved, after.reserved) == ([], before.reserved)
    assert launcher._actors.places == places  # Agents start where they were.
    (said,) = caplog.messages
    assert said.startswith("the Ray driver of charlm (process 12) was killed by SIGKILL; it was started again")
    assert {each.opened[0]["name"] for each in drivers} == {"charlm"}
    assert [len(each.environment["RAY_AUTH_TOKEN"]) for each in drivers] == [64] * 3
    await launcher.close()
    assert all(each.closed for each in drivers)


async def test_a_driver_is_asked_on_any_loop_and_says_how_it_was_lost(monkeypatch):
    monkeypatch.setattr(ray_workers, "DRIVER", "worker_entries:deeds")
    driver = RayDriver("charlm", {})
    assert await driver.ask("echo", here=1) == {"here": 1}
    assert driver.lost is None
    asked, loop = asyncio.Event(), asyncio.get_running_loop()

    async def ask():
        asking = asyncio.ensure_future(driver.ask("never"))
        await asyncio.sleep(0)
        loop.call_soon_threadsafe(asked.set)
        await asking

    asking = asyncio.ensure_future(asyncio.to_thread(asyncio.run, ask()))  # As the group of agents, which has its own.
    await asked.wait()
    pid = child_named("Ray driver of charlm")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(LauncherError, match="worker 'Ray driver of charlm' was killed by SIGKILL"):
        await asking
    assert driver.lost == f"Ray driver of charlm (process {pid}) was killed by SIGKILL"
    await driver.close()


async def test_other_machines_must_be_told_where_to_connect(drivers):
    for each in drivers:
        each.nodes[1]["address"] = "10.0.0.2"
    with pytest.raises(OptionError, match=r"other machines \(10.0.0.2\).*interface.*knows it as 10.0.0.1"):
        await RayWorkers("auto").prepare([PlannedWorker("w", ("cpu:0",))])
    launcher = RayWorkers("auto", interface="127.0.0.1")
    assert await launcher.prepare([PlannedWorker("w", ("cpu:0",))]) == ("127.0.0.1", 0)
    assert "RAY_AUTH_TOKEN" not in drivers[1].environment
    await launcher.close()


async def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"needs Ray; to install it.*\[ray\]"):
        await asyncio.wait_for(RayWorkers().prepare([PlannedWorker("w", ("cpu:0",))]), SECONDS)
    for wrong in (
        {"placement": "rack"},
        {"hosts": 0},
        {"cpus": -1},
        {"address": ""},
        {"placement": "device", "hosts": 1},
        {"placement_group": "mine"},
    ):
        with pytest.raises(OptionError):
            RayWorkers(**wrong)


async def test_nothing_is_left_of_a_start_that_an_agent_cannot_make(cluster, monkeypatch):
    monkeypatch.setattr(ray_workers, "PROGRAM", "/no/such/program")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "asyncpipe" else object())
    recorded = Recorded(launcher=RayWorkers())
    ask = Cluster.ask

    async def fails(self, do, **arguments):
        if do == "start":
            raise LauncherError("asyncpipe is not installed on second")
        return await ask(self, do, **arguments)

    monkeypatch.setattr(Cluster, "ask", fails)
    async with recorded.group as group:
        with pytest.raises(Exception, match="asyncpipe is not installed on second"):
            await group.start("w", devices={"w": ("cpu:0",)})
    await until("Ray is told to end", lambda: cluster.closed)
