"""Steps by programs on real threads: faults, cancellations and hung tasks at every place, and between two places."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asyncpipe.core.engine.events import StepCancelled, TaskCompleted
from asyncpipe.core.graph.lower import CheckpointMode, lower
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.runtime.driver import Driver
from asyncpipe.runtime.thread_executor import ThreadExecutor

DEVICES = ["cpu:0", "cpu:1"]
GRAPH = lower(find_schedule("1f1b"), Shape(2, 3, 2), devices=DEVICES, checkpoint=CheckpointMode.NEVER)
LAST = len(GRAPH.tasks) - 1


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
    made = Driver({name: Watched(name) for name in DEVICES}, in_flight=3)
    made.open()
    yield made
    await made.drain()
    made.close()
    made.join()
    made.scheduler.check()
    assert made.scheduler.idle


def bind_nothing(task):
    return lambda: None


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
