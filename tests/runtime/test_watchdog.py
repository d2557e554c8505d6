"""The watchdog: a task that hangs fails its step, its device continues, and its result is ignored."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from functools import partial
from queue import SimpleQueue

import pytest
from driver_helpers import DEVICES, Queued, StepStub, bind_nothing, open_driver

from asyncpipe.core.engine.events import TaskCompleted, TaskDropped, TaskIssued
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import HungTaskError, OptionError, TaskError
from asyncpipe.runtime.driver import Driver
from asyncpipe.runtime.executor import Assignment
from asyncpipe.runtime.thread_executor import ThreadExecutor
from asyncpipe.runtime.watchdog import Watchdog

GRAPH = lower(find_schedule("1f1b"), Shape(2, 4, 2), devices=DEVICES, checkpoint=CheckpointMode.NEVER)


class Clock:
    """Seconds since tasks began, as the watchdog sees them."""

    def __init__(self):
        self.ahead = 0.0

    def __call__(self):
        return time.perf_counter() + self.ahead


class Hung:
    """Blocks in one task until ``let_go``; notes the threads that ran it."""

    def __init__(self, task_id="F(1,1)"):
        self.task_id = task_id
        self.begun, self.let_go = threading.Event(), threading.Event()
        self.threads = []
        self.returned = threading.Event()

    def bind(self, task):
        return self.work if task.id == self.task_id else lambda: None

    def work(self):
        self.threads.append(threading.current_thread())
        self.begun.set()
        assert self.let_go.wait(30)
        self.returned.set()


def told():
    """Stands in for the report that a task failed."""


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def driver(no_leaks):
    async with open_driver() as made:
        yield made


async def begin(driver, hung, graph=GRAPH):
    step = asyncio.ensure_future(driver.run(graph, hung.bind))
    await asyncio.get_running_loop().run_in_executor(None, hung.begun.wait, 30)
    return step


async def test_the_step_of_a_hung_task_fails_and_others_go_on(driver, clock, caplog):
    hung = Hung()
    watchdog = Watchdog(driver, floor=60.0, clock=clock)
    step = await begin(driver, hung)
    behind = asyncio.ensure_future(driver.run(GRAPH, bind_nothing))
    (running,) = [each for each in driver.running() if GRAPH.tasks[each.task].id == hung.task_id]
    # The other device has tasks of its own before.
    while not driver._waits(running.execution, running.task):  # noqa: ASYNC110 - nothing tells when it waits
        await asyncio.sleep(0)
    clock.ahead = 601.0
    watchdog.check()
    with pytest.raises(TaskError, match=r"F\(1,1\) failed") as caught:
        await step
    cause = caught.value.__cause__
    assert isinstance(cause, HungTaskError)
    assert (cause.task_id, cause.device, cause.expected) == ("F(1,1)", "cpu:1", None)
    assert cause.seconds > 600
    assert cause.state == "computing"
    assert cause.waits == ("C(1,1>0) on cpu:0 waits for B(1,1)",)  # Which is behind it on its device.
    assert "assert self.let_go.wait(30)" in cause.stack
    await (await behind).completed()
    assert watchdog.hung == 1
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    first, _, _ = record.getMessage().partition("in work")
    assert "hung thread, asyncpipe cpu:1:" in first
    hung.let_go.set()
    hung.threads[0].join(30)
    assert not hung.threads[0].is_alive()
    watchdog.check()
    assert watchdog.hung == 1
    await (await driver.run(GRAPH, bind_nothing)).completed()


async def test_how_long_it_waits(driver, clock, monkeypatch):
    """The floor, or the factor times the mean, whichever is longer; ten floors without a mean."""
    hung = Hung()
    step = await begin(driver, hung)
    for expected, patience in ((0.001, 8.0), (2.0, 20.0), (None, 80.0)):
        monkeypatch.setattr(driver.scheduler, "expected", lambda number, task, found=expected: found)
        watchdog = Watchdog(driver, factor=10.0, floor=8.0, clock=clock)
        # The task began up to some seconds ago, if the machine is busy.
        clock.ahead = patience - 4.0
        watchdog.check()
        assert watchdog.hung == 0
    clock.ahead = 80.1
    watchdog.check()
    assert watchdog.hung == 1
    with pytest.raises(TaskError):
        await step
    hung.let_go.set()


async def test_one_that_ends_in_time_is_left_alone(driver, clock):
    """It ended between the check and the attempt to give it up."""
    hung = Hung()
    step = await begin(driver, hung)
    (running,) = driver.running()
    assert GRAPH.tasks[running.task].id == "F(1,1)"
    hung.let_go.set()
    await (await step).completed()
    assert not running.executor.give_up(running.current, told)
    assert driver.running() == []
    driver.fail(running.execution, running.task, ValueError("late"))
    await (await driver.run(GRAPH, bind_nothing)).completed()


async def test_it_checks_at_intervals_and_goes_on_after_an_error(driver, caplog):
    pauses = SimpleQueue()
    checked = asyncio.Event()

    async def sleep(seconds):
        pauses.put(seconds)
        await asyncio.sleep(0)

    class Broken(Watchdog):
        checks = 0

        def check(self):
            self.checks += 1
            if self.checks == 1:
                raise LookupError
            checked.set()

    async with Broken(driver, floor=8.0, sleep=sleep):
        await checked.wait()
    assert pauses.get() == 2.0
    assert "the watchdog failed" in caplog.records[0].getMessage()
    for floor, pause in ((0.01, 0.05), (600.0, 5.0)):
        checked.clear()
        while not pauses.empty():
            pauses.get()
        async with Broken(driver, floor=floor, sleep=sleep):
            await checked.wait()
        assert pauses.get() == pause


def test_mistakes_are_told():
    for options in ({"factor": 0.5}, {"floor": 0.0}, {"factor": float("nan")}):
        with pytest.raises(OptionError, match="factor must be at least 1 and floor more than 0"):
            Watchdog(Driver({}), **options)


# The executor


def test_what_waits_is_taken_over_in_its_order(executor):
    """The rest of the batch runs, then later tasks; each is reported once, the hung one never."""
    hung, step, ran = Hung(), StepStub(), []

    def work(number):
        return lambda: ran.append((number, threading.current_thread()))

    executor.submit([Assignment(step, 0, work(0)), Assignment(step, 1, hung.work), Assignment(step, 2, work(2))])
    executor.submit([Assignment(step, 3, work(3))])
    assert hung.begun.wait(30)
    handle, task, _, _ = current = executor.running[0]
    assert (handle, task) == (step, 1)
    assert executor.thread == hung.threads[0].ident
    assert executor.give_up(current, told)
    assert not executor.give_up(current, told)
    assert executor.thread != hung.threads[0].ident
    executor.submit([Assignment(step, 4, work(4))])
    events = [executor.events.get(timeout=30) for _ in range(4)]
    assert [(type(event), event.task) for event in events] == [(TaskCompleted, task) for task in (0, 2, 3, 4)]
    assert [number for number, _ in ran] == [0, 2, 3, 4]
    assert len({thread for _, thread in ran}) == 2
    hung.let_go.set()
    hung.threads[0].join(30)
    assert not executor.running
    executor.submit([Assignment(step, 5, work(5))])
    assert executor.events.get(timeout=30).task == 5
    assert executor.events.empty()


def test_what_a_given_up_task_raises_is_dropped(executor):
    hung, step = Hung(), StepStub()

    def work():
        hung.work()
        raise ValueError

    executor.submit([Assignment(step, 0, work)])
    assert hung.begun.wait(30)
    assert executor.give_up(executor.running[0], told)
    hung.let_go.set()
    hung.threads[0].join(30)
    assert not hung.threads[0].is_alive()
    assert executor.events.empty()


def test_what_is_queued_of_its_step_is_dropped(executor):
    hung, step = Hung(), StepStub()
    executor.submit([Assignment(step, 0, hung.work), Assignment(step, 1, lambda: None)])
    assert hung.begun.wait(30)
    assert executor.give_up(executor.running[0], step.abort.confirm)
    assert executor.events.get(timeout=30) == TaskDropped(3, 1)
    hung.let_go.set()


def test_a_completion_that_never_comes(executor):
    """The thread that waits for completions is replaced; the device's thread is not."""
    first, second, step = Queued(), Queued(), StepStub()
    executor.submit([Assignment(step, 0, lambda: first), Assignment(step, 1, lambda: second)])
    assert [executor.events.get(timeout=30) for _ in range(2)] == [TaskIssued(3, 0), TaskIssued(3, 1)]
    assert first.waited.wait(30)
    thread, current = executor.thread, executor.running[0]
    assert current[:2] == (step, 0)
    assert executor.give_up(current, told)
    assert executor.thread == thread
    second.done.set()
    assert executor.events.get(timeout=30) == TaskCompleted(3, 1, 1.0, 2.0)
    first.done.set()
    executor.submit([Assignment(step, 2, lambda: None)])
    assert executor.events.get(timeout=30).task == 2
    assert executor.events.empty()


def test_closing_does_not_wait_for_a_thread_that_was_given_up(caplog):
    hung = Hung()
    executor = ThreadExecutor("cpu:0")
    executor.start(lambda event, *, wake=True, at=None: None)
    executor.submit([Assignment(StepStub(), 0, hung.work)])
    assert hung.begun.wait(30)
    assert executor.give_up(executor.running[0], told)
    executor.close()
    executor.join()
    assert "1 threads of tasks that were given up still run: asyncpipe cpu:0" in caplog.text
    hung.let_go.set()
    hung.threads[0].join(30)


def waiting_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("asyncpipe cpu:0 completions")]


def test_completions_of_tenants_do_not_wait_for_each_other(executor):
    """Each tenant has a thread that waits for its completions. It ends when the tenant has left, once it is done."""
    queued = {name: Queued() for name in "ab"}
    steps = {name: StepStub() for name in "ab"}
    for number, (name, step) in enumerate(steps.items()):
        step.tenant = name
        executor.submit([Assignment(step, number, partial(queued.get, name))])
        assert queued[name].waited.wait(30)
    assert [current[:2] for current in executor.running] == [(steps["a"], 0), (steps["b"], 1)]
    queued["b"].done.set()
    events = [executor.events.get(timeout=30) for _ in range(3)]
    assert events == [TaskIssued(3, 0), TaskIssued(3, 1), TaskCompleted(3, 1, 1.0, 2.0)]
    first, second = waiting_threads()
    executor.leave("b")
    executor.leave("a")
    second.join(30)
    assert not second.is_alive()
    (current,) = executor.running  # It may still be given up.
    assert executor.give_up(current, told)
    queued["a"].done.set()
    for thread in (first, *waiting_threads()):
        thread.join(30)
    assert not waiting_threads()


def test_a_busy_thread_does_not_hide_a_completion_that_never_comes(executor):
    queued, busy, step = Queued(), Hung(), StepStub()
    executor.submit([Assignment(step, 0, lambda: queued)])
    assert queued.waited.wait(30)
    executor.submit([Assignment(step, 1, busy.work)])
    assert busy.begun.wait(30)
    assert executor.running[0][1] == 0
    assert executor.give_up(executor.running[0], told)
    queued.done.set()
    assert executor.running[0][1] == 1
    busy.let_go.set()
    assert [executor.events.get(timeout=30).task for _ in range(2)] == [0, 1]


async def test_what_nobody_watched_does_not_count(driver, clock):
    """After the process was stopped or the loop blocked, the time of running tasks starts anew."""
    hung = Hung()
    step = await begin(driver, hung)
    watchdog = Watchdog(driver, floor=8.0, clock=clock)
    for ahead in (0.0, 1000.0, 1004.0, *range(1006, 1080, 4)):
        clock.ahead = ahead
        watchdog.check()
        assert watchdog.hung == 0
    clock.ahead = 1080.1
    watchdog.check()
    assert watchdog.hung == 1
    with pytest.raises(TaskError):
        await step
    hung.let_go.set()
