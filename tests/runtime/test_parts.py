"""Parts of steps on drivers of their own, with real threads: devices open each other's gates across drivers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from invariants import check_scheduler

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.part import part
from asyncpipe.core.graph.task_graph import TaskGraph, Wiring
from asyncpipe.core.policies.share import Share
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import PipelineClosedError, TaskError
from asyncpipe.runtime.driver import Driver
from asyncpipe.runtime.execution import Gates
from asyncpipe.runtime.step_driver import Tenant
from asyncpipe.runtime.thread_executor import ThreadExecutor

DEVICES = ["cpu:0", "cpu:1", "cpu:2"]
SKIPS = Wiring(((0, 1), (0, 2), (1, 2)), (), (0, 1, 2))
WORKERS = [["cpu:0", "cpu:2"], ["cpu:1"]]


def graph_of(order="strict"):
    schedule = find_schedule("1f1b", order=order)
    return lower(schedule, Shape(3, 4, 3), devices=DEVICES, checkpoint=CheckpointMode.ALWAYS, wiring=SKIPS)


@dataclass(eq=False)
class Split:
    """One step in two parts; its tasks note in ``done`` what has run, and open the gates of the other part."""

    graph: TaskGraph
    parts: list = field(init=False)
    gates: list = field(init=False)
    done: list = field(default_factory=list)
    fails: str | None = None
    call: dict = field(default_factory=dict)
    """By task, what it calls."""

    def __post_init__(self):
        self.parts = [part(self.graph, devices) for devices in WORKERS]
        self.gates = [Gates() for _ in WORKERS]

    def bind(self, worker):
        mine, other = self.parts[worker], 1 - worker

        def work(task):
            whole = mine.whole[task.number]
            if task.id == self.fails:
                raise ValueError(task.id)
            assert set(self.graph.dependencies[whole]) <= set(self.done)
            self.done.append(whole)
            self.call.get(task.id, lambda: None)()
            for sent in mine.departures[task.number]:
                self.gates[other].open([self.parts[other].arrivals[sent.task, sent.dependency]])

        return lambda task: lambda: work(task)

    def start(self, drivers, worker, *, after=None, tenant=None):
        graph, bind = self.parts[worker].graph, self.bind(worker)
        return drivers[worker].start(graph, bind, gates=self.gates[worker], after=after, tenant=tenant)


@pytest.fixture
async def drivers(no_leaks):
    made = [Driver({name: ThreadExecutor(name) for name in devices}) for devices in WORKERS]
    for driver in made:
        driver.open()
    yield made
    for driver in made:
        await driver.drain()
        driver.close()
        driver.join()
        check_scheduler(driver.scheduler)
        assert not driver.scheduler._steps


@pytest.mark.parametrize("how", ["programs", "single", "rule"])
async def test_two_drivers_run_one_step_together(drivers, how):
    graph = graph_of("hint" if how == "rule" else "strict")
    for _ in range(10):
        split = Split(graph)
        tenants = [Tenant(Share("job" if how == "single" else "")) for _ in WORKERS]
        executions = [split.start(drivers, worker, tenant=tenants[worker]) for worker in range(2)]
        assert all(bool(execution.runs) is (how == "programs") for execution in executions)
        for execution in executions:
            await execution.completed()
        assert sorted(split.done) == list(range(len(graph.tasks)))


async def test_a_driver_may_be_steps_behind_the_other(drivers):
    """What the first one sends waits for the second one, which begins when the first one stands."""
    graph, stands, loop = graph_of(), asyncio.Event(), asyncio.get_running_loop()
    splits = [Split(graph) for _ in range(3)]
    splits[0].call["F(2,0)"] = lambda: loop.call_soon_threadsafe(stands.set)
    earlier = None
    for split in splits:
        earlier = split.start(drivers, 0, after=earlier)
    await asyncio.wait_for(stands.wait(), 30)
    earlier = None
    for split in splits:
        earlier = split.start(drivers, 1, after=earlier)
    await earlier.completed()
    await asyncio.gather(*(driver.drain() for driver in drivers))
    for split in splits:
        assert sorted(split.done) == list(range(len(graph.tasks)))


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("fails", ["F(0,0)", "C(1,0>2)", "B(2,1)", "U(1)"])
async def test_a_part_that_fails_leaves_the_other_to_be_cancelled(drivers, fails, named):
    split = Split(graph_of(), fails=fails)
    tenants = [Tenant(Share("job" if named else "")) for _ in WORKERS]
    executions = [split.start(drivers, worker, tenant=tenants[worker]) for worker in range(2)]
    failing = int(fails[-2] == "1")
    with pytest.raises(TaskError, match="ValueError"):
        await executions[failing].completed()
    drivers[1 - failing].cancel(executions[1 - failing])
    if fails == "U(1)":  # Nothing of the other part waits for it, so that one may have ended.
        await executions[1 - failing].done
    else:
        with pytest.raises(PipelineClosedError):
            await executions[1 - failing].completed()
    again = Split(graph_of())
    for execution in [again.start(drivers, worker, tenant=tenants[worker]) for worker in range(2)]:
        await execution.completed()
    assert sorted(again.done) == list(range(len(again.graph.tasks)))
