"""The driver: several graphs at once, completion after issue, and no wait without an end."""

from __future__ import annotations

import asyncio
import threading
from contextlib import nullcontext
from functools import partial

import pytest
from driver_helpers import DEVICES, Queued, bind_nothing, open_driver

from asyncpipe.core.engine.events import TaskCompleted
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import Wiring
from asyncpipe.core.policies.share import Share
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import InvalidTransition, PipelineClosedError, TaskError
from asyncpipe.runtime.driver import Driver, tasks_ahead
from asyncpipe.runtime.step_driver import Tenant
from asyncpipe.runtime.thread_executor import ThreadExecutor


def graph(schedule="1f1b", microbatches=4):
    shape = Shape(2, microbatches, 2)
    return lower(find_schedule(schedule), shape, devices=DEVICES, checkpoint=CheckpointMode.EXCEPT_LAST)


@pytest.fixture
async def driver(no_leaks):
    async with open_driver(in_flight=3) as made:
        yield made


@pytest.mark.parametrize("error", [None, ValueError("device")])
async def test_a_step_returns_when_issued_and_completes_or_fails_later(driver, error):
    later = Queued(error)
    last = graph().tasks[-1].id
    execution = await driver.run(graph(), lambda task: lambda: later if task.id == last else None)
    assert not execution.done.done()
    later.done.set()
    with pytest.raises(TaskError, match="ValueError: device") if error else nullcontext():
        assert (await execution.completed()).outcome == "ok"


async def test_the_in_flight_cap_holds_back_an_asynchronous_device(driver):
    """The fourth task is issued only when one of three issued tasks has completed."""
    laters = {}
    issued = SimpleCounter()

    def bind(task):
        later = laters[task.id] = Queued()
        if task.kind == "F" and task.stage == 0:
            return lambda: (issued.add(), later)[1]
        later.done.set()
        return lambda: None

    step = asyncio.ensure_future(driver.run(graph("gpipe", 8), bind))
    await asyncio.to_thread(issued.wait_for, 3)
    for number in range(8):
        assert issued.count == min(number + 3, 8)
        laters[f"F({number},0)"].done.set()
        if number + 4 <= 8:
            await asyncio.to_thread(issued.wait_for, number + 4)
    await (await step).completed()


@pytest.mark.parametrize(
    ("most", "tasks", "seconds", "ahead"),
    [(16, 64, 0.0, 16), (16, 64, 0.02, 16), (16, 64, 0.128, 10), (16, 64, 0.4, 4), (16, 64, 40.0, 4), (2, 64, 40.0, 2)],
)
def test_the_host_runs_twenty_milliseconds_ahead_and_four_tasks(most, tasks, seconds, ahead):
    assert tasks_ahead(most, tasks, seconds) == ahead


async def test_a_device_begins_the_next_step_while_another_ends_the_one_before(driver):
    """No device waits for the others at the border of two steps that run by programs."""
    overlapping = lower(find_schedule("zb-h2"), Shape(2, 4, 2), devices=DEVICES, wiring=Wiring(((0, 1),), (), (0, 1)))
    begun = threading.Event()

    def bind(number, task):
        def work():
            if (number, task.id) == (1, "F(0,0)"):
                begun.set()
            assert (number, task.id) != (0, "W(3,1)") or begun.wait(30), "it waits"

        return work

    first = driver.start(overlapping, partial(bind, 0))
    second = driver.start(overlapping, partial(bind, 1), after=first)
    assert first.runs
    assert second.runs
    await first.completed()
    await second.completed()


class SimpleCounter:
    """Counts, and lets others wait for a number."""

    def __init__(self):
        self.count = 0
        self.condition = threading.Condition()

    def add(self):
        with self.condition:
            self.count += 1
            self.condition.notify_all()

    def wait_for(self, number):
        with self.condition:
            assert self.condition.wait_for(lambda: self.count >= number, 30)


async def test_closed_or_not_open():
    driver = Driver({name: ThreadExecutor(name) for name in DEVICES})
    with pytest.raises(PipelineClosedError):
        await driver.run(graph(), bind_nothing)
    driver.open()
    driver.close()
    with pytest.raises(PipelineClosedError):
        await driver.run(graph(), bind_nothing)
    driver.join()


async def test_a_step_that_is_refused_is_not_under_way(driver):
    await driver.run(graph(), bind_nothing)
    with pytest.raises(InvalidTransition):
        driver.start(graph(), bind_nothing, number=0)
    assert not driver.is_busy
    await driver.run(graph(), bind_nothing)


async def test_what_is_known_of_a_job_stays_until_its_last_pipeline_leaves(driver):
    tenants = [Tenant(Share("job")), Tenant(Share("job"))]
    for tenant in tenants:
        await (await driver.run(graph(), bind_nothing, tenant=tenant)).completed()
    known = []
    for tenant in tenants:
        await driver.drain(tenant)
        known.append(set(driver.scheduler._jobs._jobs))
    assert known == [{"job"}, set()]


async def test_a_broken_scheduler_hangs_nobody(no_leaks):
    """A bug in the scheduler is raised by every step that is awaited."""
    driver = Driver({name: ThreadExecutor(name) for name in DEVICES})
    driver.open()
    handle = driver.scheduler.handle

    def broken(event, now):
        if isinstance(event, TaskCompleted):
            raise AssertionError("a bug")
        return handle(event, now)

    driver.scheduler.handle = broken
    seen = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: seen.append(context["exception"]))
    with pytest.raises(AssertionError, match="a bug"):
        await driver.run(graph(), bind_nothing)
    driver.join()
    assert seen


@pytest.mark.parametrize("everyone", [False, True])
async def test_draining_ends_although_somebody_goes_on_stepping(driver, everyone):
    """The step under way ends normally; the next one is refused before it runs."""
    tenant, neighbour = Tenant(Share("a")), Tenant(Share("b"))
    ran = SimpleCounter()
    begun, let_go = threading.Event(), threading.Event()

    def hold(task):
        begun.set()
        assert let_go.wait(30)

    async def train():
        await driver.run(graph(), lambda task: lambda: hold(task), tenant=tenant)
        while True:
            await driver.run(graph(), lambda task: ran.add, tenant=tenant)

    training = asyncio.ensure_future(train())
    await asyncio.to_thread(begun.wait, 30)
    draining = asyncio.ensure_future(driver.drain(None if everyone else tenant))
    await asyncio.sleep(0)
    let_go.set()
    try:
        await asyncio.wait_for(draining, 10)
        with pytest.raises(PipelineClosedError, match="the pipeline is closed"):
            await training
    finally:
        training.cancel()
        await asyncio.wait([training])
    assert ran.count == 0
    assert not driver.accepts(tenant)
    assert driver.accepts(neighbour) is not everyone
    if not everyone:
        await (await driver.run(graph(), bind_nothing, tenant=neighbour)).completed()
