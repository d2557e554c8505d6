"""Intra-op threads: set on each device's thread, unchanged on other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch

from asyncpipe.core.engine.events import Event, TaskCompleted
from asyncpipe.ops.device.intra_op_threads import IntraOpThreads
from asyncpipe.runtime.executor import Assignment
from asyncpipe.runtime.step_abort import StepAbort
from asyncpipe.runtime.thread_executor import ThreadExecutor

CALLERS = 3


@pytest.fixture(autouse=True)
def callers_threads() -> Iterator[None]:
    """A number that is neither the default of a small machine nor what the devices get."""
    before = torch.get_num_threads()
    torch.set_num_threads(CALLERS)
    yield
    torch.set_num_threads(before)


def in_thread(function: Callable[[], int]) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def seen_by(executor: ThreadExecutor, events: SimpleQueue[Event]) -> int:
    """How many intra-op threads a task of ``executor`` has."""
    found: list[int] = []
    step = SimpleNamespace(number=0, abort=StepAbort(0))
    executor.submit([Assignment(step, 0, lambda: found.append(torch.get_num_threads()))])
    assert isinstance(events.get(timeout=10), TaskCompleted)
    return found[0]


@pytest.mark.usefixtures("no_leaks")
def test_each_devices_thread_has_its_own_number() -> None:
    intra_op = IntraOpThreads(1)
    events: SimpleQueue[Event] = SimpleQueue()
    executors = [ThreadExecutor(f"cpu:{k}", on_start=intra_op.initializer()) for k in range(3)]
    for executor in executors:
        executor.start(lambda event, *, wake=True, at=None: events.put(event))
    intra_op.wait()
    try:
        assert [seen_by(executor, events) for executor in executors] == [1, 1, 1]
        assert torch.get_num_threads() == CALLERS
        assert in_thread(torch.get_num_threads) == CALLERS, "threads that start later"
        assert [seen_by(executor, events) for executor in executors] == [1, 1, 1], "settling leaves them alone"
    finally:
        for executor in executors:
            executor.close()
            executor.join()
