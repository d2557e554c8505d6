"""The same scheduler on virtual time: what a step would do at given costs."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from asyncpipe.core.costs import Costs
from asyncpipe.core.events import (
    Command,
    Dispatch,
    GateOpened,
    StepCompleted,
    StepRecord,
    StepSubmitted,
    TaskCompleted,
)
from asyncpipe.core.graph import TaskGraph
from asyncpipe.core.scheduler import SchedulerState
from asyncpipe.core.task import Lane, Task

__all__ = ["simulate"]


class _VirtualLanes:
    """Lanes that run one task at a time in the order of dispatch; each begins when its dependencies have ended."""

    def __init__(self, graph: TaskGraph, cost: Callable[[Task], float]) -> None:
        self._graph = graph
        self._cost = cost
        self._free: dict[Lane, float] = {}
        self._end: dict[int, float] = {}

    def run(self, number: int, now: float) -> tuple[float, float]:
        task = self._graph.tasks[number]
        ends = [self._end[dependency] for dependency in self._graph.dependencies[number]]
        start = max(now, self._free.get(task.lane, 0.0), *ends)
        end = start + self._cost(task)
        self._free[task.lane] = self._end[number] = end
        return start, end


def simulate(graph: TaskGraph, cost: Callable[[Task], float] | None = None, *, in_flight: int = 16) -> StepRecord:
    """The record of one step of ``graph`` at the given costs (``Costs()`` by default), from time 0.

    It is deterministic: tasks that end at the same virtual time are reported in the order of their numbers. Raises
    what a ruled schedule raises while it decides, as ``ScheduleError``.
    """
    state = SchedulerState(in_flight=in_flight)
    lanes = _VirtualLanes(graph, cost or Costs())
    ends: list[tuple[float, int, float]] = []
    now = 0.0
    commands: list[Command] = state.handle(StepSubmitted(0, graph), now)
    for microbatch in range(len(graph.gates)):
        commands += state.handle(GateOpened(0, microbatch), now)
    while not any(isinstance(command, StepCompleted) for command in commands):
        for command in commands:
            if isinstance(command, Dispatch):
                start, end = lanes.run(command.task, now)
                heappush(ends, (end, command.task, start))
        # A rule chooses when all that ends at this moment has ended, copies that take no time included.
        commands = [] if ends and ends[0][0] <= now else state.settle(now)
        if not commands:
            now, number, start = heappop(ends)
            commands = state.handle(TaskCompleted(0, number, start, now), now)
    for command in commands:
        if isinstance(command, StepCompleted) and command.error is not None:
            raise command.error
    return state.take_record(0)
