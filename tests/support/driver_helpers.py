"""What tests of drivers and of devices' threads share: a driver that must be idle at the end, an executor alone."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from queue import SimpleQueue
from typing import Any

from invariants import check_scheduler

from asyncpipe.core.graph.task import Task
from asyncpipe.runtime.driver import Driver
from asyncpipe.runtime.step_abort import StepAbort
from asyncpipe.runtime.thread_executor import ThreadExecutor

__all__ = ["DEVICES", "Queued", "StepStub", "bind_nothing", "executor_alone", "open_driver"]

DEVICES = ["cpu:0", "cpu:1"]


class StepStub:
    """What an executor knows of a step."""

    number, graph, tenant = 3, None, None

    def __init__(self) -> None:
        self.abort = StepAbort(self.number)


class Queued:
    """What an asynchronous device has queued: it is done, or fails, when the test sets ``done``."""

    def __init__(self, error: Exception | None = None) -> None:
        self.waited, self.done = threading.Event(), threading.Event()
        self.error = error

    def wait(self) -> tuple[float, float]:
        self.waited.set()
        assert self.done.wait(30)
        if self.error is not None:
            raise self.error
        return 1.0, 2.0


@asynccontextmanager
async def open_driver(
    kind: type[ThreadExecutor] = ThreadExecutor, devices: Sequence[str] = DEVICES, **options: Any
) -> AsyncIterator[Driver]:
    """An open driver of these devices. At the end it is drained, and its scheduler must have nothing left."""
    made = Driver({name: kind(name) for name in devices}, **options)
    made.open()
    yield made
    await made.drain()
    made.close()
    made.join()
    check_scheduler(made.scheduler)
    assert not made.scheduler._steps


@contextmanager
def executor_alone() -> Iterator[tuple[ThreadExecutor, SimpleQueue[Any]]]:
    """The executor of one device, and the queue to which it posts its events."""
    made, events = ThreadExecutor("cpu:0"), SimpleQueue[Any]()
    made.start(lambda event, *, wake=True, at=None: events.put(event))
    yield made, events
    made.close()
    made.join()


def bind_nothing(task: Task) -> Callable[[], None]:
    """Tasks that do nothing."""
    return lambda: None
