"""Emulated devices under the real runtime: tasks take given times, as kernels on the streams of GPUs do.

Driver, scheduler and executor threads are those of every pipeline, and know only that the devices are asynchronous. A
task's function returns at once, as a launch does. What it queued begins when the lane is free, its dependencies are
over, *and* the host has got so far; it ends a given time later::

    executor thread     launch F0  launch F1  launch F2 …                       the host runs ahead of the device
    lane                  [  F0  ][  F1  ][  F2  ] …                            in real time
    completion thread            wait    wait    wait …                         reports when tasks began and ended

So a scheduler that is late shows as idle time, and threads that wake up late do not, as on a GPU.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from asyncpipe.core.graph.task import Lane, Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.runtime.driver import Driver
from asyncpipe.runtime.executor import Completion, TaskFunction
from asyncpipe.runtime.thread_executor import ThreadExecutor

__all__ = ["run_steps"]

Cost = Callable[[Task], float]


class _Queued(NamedTuple):
    """Work on an emulated lane, from ``start`` to ``end`` in seconds of ``time.perf_counter``."""

    start: float
    end: float

    def wait(self) -> tuple[float, float]:
        time.sleep(max(0.0, self.end - time.perf_counter()))
        return self


class _EmulatedLanes:
    """The lanes of all devices in one step. Each lane is used by one thread, that of its device."""

    def __init__(self, graph: TaskGraph, cost: Cost) -> None:
        self._graph = graph
        self._cost = cost
        self._free: dict[Lane, float] = {}
        """When each lane has done all that is queued on it."""
        self._ends: dict[int, float] = {}
        """When each task that was launched ends; what it waits for was launched before, maybe by another thread."""

    def bind(self, task: Task) -> TaskFunction:
        return partial(self._launch, task)

    def _launch(self, task: Task) -> Completion:
        before = (self._ends[number] for number in self._graph.dependencies[task.number])
        start = max(time.perf_counter(), self._free.get(task.lane, 0.0), *before)
        end = self._free[task.lane] = self._ends[task.number] = start + self._cost(task)
        return _Queued(start, end)


async def run_steps(graph: TaskGraph, cost: Cost, count: int) -> Sequence[StepRecord]:
    """The records of ``count`` steps of ``graph``, one after the other; a task takes ``cost`` seconds."""
    driver = Driver({device: ThreadExecutor(device) for device in graph.devices})
    driver.open()
    try:
        return [await (await driver.run(graph, _EmulatedLanes(graph, cost).bind)).completed() for _ in range(count)]
    finally:
        driver.close()
        await asyncio.to_thread(driver.join)
