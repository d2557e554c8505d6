"""Steps by programs on real threads: faults, cancellations and hung tasks at every place, and between two places."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import nullcontext

import pytest
from driver_helpers import DEVICES, Queued, StepStub, bind_nothing, open_driver
from invariants import check_scheduler

from asyncpipe.core.engine.events import StepCancelled, TaskCompleted
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.programs import programs
from asyncpipe.core.graph.task_graph import Phase
from asyncpipe.core.policies.share import Share
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import HungTaskError, PipelineClosedError, TaskError
from asyncpipe.runtime.driver import Driver
from asyncpipe.runtime.execution import Gates
from asyncpipe.runtime.executor import Assignment
from asyncpipe.runtime.program_run import ProgramRun
from asyncpipe.runtime.step_driver import Tenant
from asyncpipe.runtime.thread_executor import ThreadExecutor
from asyncpipe.runtime.watchdog import Watchdog

GRAPH = lower(find_schedule("1f1b"), Shape(2, 3, 2), devices=DEVICES, checkpoint=CheckpointMode.NEVER)
LAST = len(GRAPH.tasks) - 1
EVERY_TASK = [task.id for task in GRAPH.tasks]
BACKWARD = lower(find_schedule("gpipe"), Shape(2, 3, 2), devices=DEVICES, phase=Phase.BACKWARD)


class Watched(ThreadExecutor):
    """Calls ``after`` on the device's thread with each event that was posted."""

    after = staticmethod(lambda event: None)

    def start(self, post):
        def watched(event, **options):
            post(event, **options)
            self.after(event)

        super().start(watched)


@pytest.fixture
async def driver(no_leaks, monkeypatch):
    async with open_driver(Watched, in_flight=3) as made:
        yield made


def when_handled(driver, monkeypatch, kind):
    """Set when the scheduler has handled an event of this kind, and the loop has executed what it answered."""
    done, handle, loop = threading.Event(), driver.scheduler.handle, asyncio.get_running_loop()

    def handled(event, now):
        commands = handle(event, now)
        if isinstance(event, kind):
            loop.call_soon(done.set)
        return commands

    monkeypatch.setattr(driver.scheduler, "handle", handled)
    return done


async def test_a_cancellation_after_the_last_task_and_before_the_end_of_its_program(driver, monkeypatch):
    """It comes too late for the scheduler, so nothing tells the devices to stop."""
    loop, cancelled = asyncio.get_running_loop(), when_handled(driver, monkeypatch, StepCancelled)

    def cancel(event):
        if isinstance(event, TaskCompleted) and event.task == LAST and not cancelled.is_set():
            loop.call_soon_threadsafe(step.cancel)
            assert cancelled.wait(30)

    for name in DEVICES:
        monkeypatch.setattr(driver._executors[name], "after", cancel)
    step = asyncio.ensure_future(driver.run(GRAPH, bind_nothing))
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(step, 10)
    await (await driver.run(GRAPH, bind_nothing)).completed()


async def test_the_journal_is_in_the_order_of_time(driver, monkeypatch):
    """A device's thread is held between the end of a task and its report, until the other device has reported."""
    reported, first = threading.Event(), driver._executors["cpu:0"]
    work = first._tasks.work
    post = work._post

    def held(event, **options):
        if isinstance(event, TaskCompleted) and GRAPH.tasks[event.task].id == "F(1,0)":
            assert reported.wait(30)
        post(event, **options)

    monkeypatch.setattr(work, "_post", held)
    monkeypatch.setattr(driver._executors["cpu:1"], "after", lambda event: reported.set())
    ran = threading.Event()

    def bind(task):
        if task.id == "F(1,0)":
            return ran.set
        return lambda: None if task.id != "F(0,1)" or ran.wait(30) else pytest.fail("waited in vain")

    record = await (await driver.run(GRAPH, bind)).completed()
    times = [at for at, _ in record.journal]
    assert times == sorted(times)


# At every task


@pytest.mark.promise(
    "A step that fails", "After a fault or a cancellation in any task, the next step on the same devices runs."
)
@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
async def test_a_fault_at_every_task(driver, error):
    for faulty in EVERY_TASK:

        def bind(task, faulty=faulty):
            def work():
                if task.id == faulty:
                    raise error("no")

            return work

        with pytest.raises(TaskError) as caught:
            await driver.run(GRAPH, bind)
        assert caught.value.task_id == faulty
        assert type(caught.value.__cause__) is error
        await (await driver.run(GRAPH, bind_nothing)).completed()


@pytest.mark.promise(
    "A step that fails", "After a fault or a cancellation in any task, the next step on the same devices runs."
)
async def test_a_cancellation_during_every_task(driver, monkeypatch):
    """A task that another device had begun may come so far only now; but none begins."""
    cancelled = when_handled(driver, monkeypatch, StepCancelled)
    for place in EVERY_TASK:
        cancelled.clear()
        assert len(await _run_and_cancel(driver, place, cancelled)) <= 1
        await (await driver.run(GRAPH, bind_nothing)).completed()


async def _run_and_cancel(driver, place, cancelled):
    """Cancel a step during its task ``place``; returns the tasks that ran after it was cancelled."""
    loop, late = asyncio.get_running_loop(), []

    def bind(task):
        def work():
            if cancelled.is_set():
                late.append(task.id)
            if task.id == place:
                loop.call_soon_threadsafe(step.cancel)
                assert cancelled.wait(30)

        return work

    step = asyncio.ensure_future(driver.run(GRAPH, bind))
    with pytest.raises(asyncio.CancelledError):
        await step
    return late


# While devices wait


@pytest.mark.parametrize("opened", [(), (2,), (2, 1), (1,)])
@pytest.mark.parametrize("how", ["cancel", "drain", "close"])
async def test_a_step_ends_while_every_device_waits_at_a_gate(no_leaks, how, opened):
    """Micro-batches whose gates are open run as far as their order lets them; then everybody waits."""
    made = Driver({name: Watched(name) for name in DEVICES}, in_flight=3)
    made.open()
    gates, done = Gates(), asyncio.Event()
    loop = asyncio.get_running_loop()
    able = sum(task.microbatch in opened[: _in_order(opened)] for task in BACKWARD.tasks)
    ran = []

    def bind(task):
        def work():
            ran.append(task.id)
            if len(ran) == able:
                loop.call_soon_threadsafe(done.set)

        return work

    step = asyncio.ensure_future(made.run(BACKWARD, bind, gates=gates))
    gates.open(opened)
    if able:
        await asyncio.wait_for(done.wait(), 30)
    else:
        await asyncio.sleep(0)
    if how == "cancel":
        step.cancel()
    elif how == "drain":
        await made.drain()
    else:
        made.close()
    with pytest.raises(asyncio.CancelledError if how == "cancel" else PipelineClosedError):
        await step
    assert len(ran) == able
    made.close()
    made.join()
    check_scheduler(made.scheduler)
    assert not made.scheduler._steps


def _in_order(opened):
    """How many of ``opened`` gates can be passed: gradients of later micro-batches come first."""
    return next((k for k, gate in enumerate(opened) if gate != 2 - k), len(opened))


@pytest.mark.parametrize("by_program", [True, False])
async def test_closing_during_a_step_cancels_it(no_leaks, by_program):
    made = Driver({name: ThreadExecutor(name) for name in DEVICES})
    made.open()
    begun, let_go, ran = threading.Event(), threading.Event(), []

    def bind(task):
        def work():
            ran.append(task.id)
            if task.id == "F(1,0)":
                begun.set()
                assert let_go.wait(30)

        return work

    step = asyncio.ensure_future(made.run(GRAPH, bind, tenant=None if by_program else Tenant(Share("job"))))
    await asyncio.to_thread(begun.wait, 30)
    closing = threading.Thread(target=made.close)
    closing.start()
    closing.join(30)
    await asyncio.sleep(0)  # The loop takes it in.
    let_go.set()
    with pytest.raises(PipelineClosedError, match="the pipeline was closed during this step"):
        await asyncio.wait_for(step, 30)
    made.join()
    assert "B(2,0)" not in ran
    assert not made.scheduler._steps


# Hung tasks


@pytest.mark.promise("Everything ends", "A hung task is found, whichever task it is, and its device can be used again.")
@pytest.mark.parametrize("place", EVERY_TASK)
async def test_a_hung_task_is_found_and_its_device_goes_on(driver, place):
    begun, let_go, threads = threading.Event(), threading.Event(), []

    def bind(task):
        def work():
            if task.id == place:
                threads.append(threading.current_thread())
                begun.set()
                assert let_go.wait(30)

        return work

    ahead = 0.0
    watchdog = Watchdog(driver, floor=60.0, clock=lambda: time.perf_counter() + ahead)
    step = asyncio.ensure_future(driver.run(GRAPH, bind))
    await asyncio.to_thread(begun.wait, 30)
    ahead = 601.0
    watchdog.check()
    with pytest.raises(TaskError) as caught:
        await step
    assert caught.value.task_id == place
    assert isinstance(caught.value.__cause__, HungTaskError)
    names = set()
    execution = await driver.run(GRAPH, lambda task: lambda: names.add(threading.current_thread()))
    await execution.completed()
    assert len(names) == 2
    assert threads[0] not in names
    let_go.set()
    threads[0].join(30)
    assert not threads[0].is_alive()


@pytest.mark.parametrize("how", ["fails", "hangs", "cancelled"])
async def test_a_completion_fails_late_while_its_device_is_at_the_cap(driver, how):
    laters = [Queued() for _ in range(3)]
    at_cap, behind = threading.Event(), []

    def bind(task):
        def work():
            if task.kind != "F" or task.stage != 0:
                return None
            if task.microbatch == 2:
                at_cap.set()
            if task.microbatch > 2:
                behind.append(task.id)
                return None
            return laters[task.microbatch]

        return work

    graph = lower(find_schedule("gpipe"), Shape(2, 5, 2), devices=DEVICES, checkpoint=CheckpointMode.NEVER)
    ahead = 0.0
    watchdog = Watchdog(driver, floor=60.0, clock=lambda: time.perf_counter() + ahead)
    step = asyncio.ensure_future(driver.run(graph, bind))
    await asyncio.to_thread(at_cap.wait, 30)
    await asyncio.to_thread(laters[0].waited.wait, 30)
    if how == "fails":
        laters[0].error = ValueError("device")
    elif how == "hangs":
        ahead = 601.0
        watchdog.check()
    else:
        step.cancel()
        await asyncio.sleep(0)  # The loop takes it in.
    for later in laters[how == "hangs" :]:
        later.done.set()
    if how == "cancelled":
        with pytest.raises(asyncio.CancelledError):
            await step
    else:
        with pytest.raises(TaskError, match=r"F\(0,0\) failed"):
            await step
    laters[0].done.set()
    assert behind == []
    await (await driver.run(graph, bind_nothing)).completed()


# The device's thread


def program_run(executor, step, functions):
    one = lower(find_schedule("gpipe"), Shape(1, len(functions), 1), devices=["cpu:0"], phase=Phase.FORWARD)
    (program,) = programs(one).programs
    run = ProgramRun(step, program, lambda task: functions[task](), nullcontext(), 3, executor.send)
    run.join([run])
    return run


def test_a_program_gets_its_turns_beside_single_tasks_that_never_end(executor):
    """A lane that a job shares is handed its next task before this one has ended, so there always is one."""
    step, order, over = StepStub(), [], threading.Event()

    def single(number):
        def work():
            order.append(number)
            if number < 100:
                executor.submit([Assignment(step, number + 1, single(number + 1))])
            else:
                over.set()

        return work

    def begin():
        executor.submit_program(program_run(executor, StepStub(), [lambda: order.append("program")] * 3))
        single(0)()

    executor.submit([Assignment(step, 0, begin)])
    assert over.wait(30)
    assert order.index(10) > 3 + order.index("program")
    assert order.count("program") == 3
