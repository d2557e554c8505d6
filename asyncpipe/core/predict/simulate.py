"""The same scheduler on virtual time: what a step, or several jobs on the same lanes, would do at given costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from asyncpipe.core.engine.events import (
    Command,
    Dispatch,
    Event,
    GateOpened,
    StepCompleted,
    StepRecord,
    StepSubmitted,
    TaskCompleted,
)
from asyncpipe.core.engine.scheduler import SchedulerState
from asyncpipe.core.engine.share import Share
from asyncpipe.core.graph.task import Lane, Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.predict.costs import Costs
from asyncpipe.errors import OptionError

__all__ = ["SimulatedRun", "SimulatedJob", "simulate", "simulate_jobs"]


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """A job for ``simulate_jobs``: steps of one graph, one after the other."""

    graph: TaskGraph
    cost: Callable[[Task], float] = field(default_factory=Costs)
    share: Share = field(default_factory=Share)
    steps: int | None = 1
    """How many; ``None`` for as many as there is time for while jobs with a number run."""
    pause: float = 0.0
    """Seconds from the end of a step to the next one: the optimizer's time, and the batch's."""
    start: float = 0.0
    """When the first step is submitted."""


@dataclass(slots=True, eq=False)
class SimulatedRun:
    """What one job did in virtual time."""

    records: list[StepRecord] = field(default_factory=list)
    """Of its completed steps."""
    seconds: dict[Lane, float] = field(default_factory=dict)
    """Device time on each lane until the end of the simulation, unfinished steps included."""


class _Simulation:
    """Lanes that run one task at a time in the order of dispatch; each begins when its dependencies have ended."""

    def __init__(self, jobs: Sequence[SimulatedJob], in_flight: int) -> None:
        self.state = SchedulerState(in_flight=in_flight)
        self.runs = [SimulatedRun() for _ in jobs]
        self.now = 0.0
        self._jobs = jobs
        self._owner: list[int] = []
        """The position of the job that each step belongs to."""
        self._free: dict[Lane, float] = {}
        self._ends: list[dict[int, float]] = []
        """When each task of each step ended, or will."""
        self._running: list[tuple[float, int, int, float]] = []
        """(end, step, task, start), next first."""
        self._begins: list[tuple[float, int]] = [(job.start, number) for number, job in enumerate(jobs)]
        """(when, job) for steps that are not submitted yet, next first."""
        self._begins.sort()
        self._left = [inf if job.steps is None else job.steps for job in jobs]

    def run(self, until: float) -> None:
        """Go on until all numbered steps are completed, or until that time."""
        commands: list[Command] = []
        while True:
            self._obey(commands)
            if self._is_over():
                return
            # Choices are made when all that happens at this moment has happened, copies that take no time included.
            commands = [] if self._next() <= self.now else self.state.choose(self.now)
            if commands:
                continue
            wake_at = self.state.wake_at(self.now)
            upcoming = min(self._next(), inf if wake_at is None else wake_at)
            if upcoming > until:
                self.now = until
                return
            assert upcoming < inf, "nothing is under way, and steps are not over"
            self.now = max(self.now, upcoming)
            commands = self._happen()

    def _next(self) -> float:
        return min(self._running[0][0] if self._running else inf, self._begins[0][0] if self._begins else inf)

    def _is_over(self) -> bool:
        numbered = [left for left in self._left if left != inf]
        return bool(numbered) and not any(numbered)

    def _happen(self) -> list[Command]:
        """The next event, if it is time for one: ends of tasks in the order of their numbers, then new steps."""
        if self._running and self._running[0][0] <= self.now:
            end, step, task, start = heappop(self._running)
            return self._handle(TaskCompleted(step, task, start, end))
        if self._begins and self._begins[0][0] <= self.now:
            return self._begin(heappop(self._begins)[1])
        return []

    def _handle(self, event: Event) -> list[Command]:
        return self.state.handle(event, self.now)

    def _begin(self, number: int) -> list[Command]:
        job, step = self._jobs[number], len(self._owner)
        self._owner.append(number)
        self._ends.append({})
        commands = self._handle(StepSubmitted(step, job.graph, job.share))
        for microbatch in range(len(job.graph.gates)):
            commands += self._handle(GateOpened(step, microbatch))
        return commands

    def _obey(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Dispatch):
                self._dispatch(command)
            elif isinstance(command, StepCompleted):
                self._complete(command)

    def _dispatch(self, command: Dispatch) -> None:
        job, ends = self._jobs[self._owner[command.step]], self._ends[command.step]
        task = job.graph.tasks[command.task]
        before = [ends[dependency] for dependency in job.graph.dependencies[command.task]]
        start = max(self.now, self._free.get(task.lane, 0.0), *before)
        end = start + job.cost(task)
        self._free[task.lane] = ends[command.task] = end
        heappush(self._running, (end, command.step, command.task, start))
        seconds = self.runs[self._owner[command.step]].seconds
        seconds[task.lane] = seconds.get(task.lane, 0.0) + end - start

    def _complete(self, end: StepCompleted) -> None:
        if end.error is not None:
            raise end.error
        number = self._owner[end.step]
        self.runs[number].records.append(self.state.take_record(end.step))
        self._ends[end.step] = {}
        self._left[number] -= 1
        if self._left[number]:
            heappush(self._begins, (self.now + self._jobs[number].pause, number))

    def cut(self) -> None:
        """Take what would only have run after the end out of the device times."""
        for end, step, task, start in self._running:
            job = self._jobs[self._owner[step]]
            self.runs[self._owner[step]].seconds[job.graph.tasks[task].lane] -= end - max(start, min(end, self.now))


def simulate(graph: TaskGraph, cost: Callable[[Task], float] | None = None, *, in_flight: int = 16) -> StepRecord:
    """The record of one step of ``graph`` at the given costs (``Costs()`` by default), from time 0.

    It is deterministic: tasks that end at the same virtual time are reported in the order of their numbers. Raises
    what a ruled schedule raises while it decides, as ``ScheduleError``.
    """
    world = _Simulation([SimulatedJob(graph, cost or Costs())], in_flight)
    world.run(inf)
    return world.runs[0].records[0]


def simulate_jobs(
    jobs: Sequence[SimulatedJob], *, until: float | None = None, in_flight: int = 16
) -> list[SimulatedRun]:
    """What each of ``jobs`` does next to the others at the given costs, from time 0; one ``SimulatedRun`` for each.

    Ends at virtual time ``until``, or when every job with a number of steps has done them. Deterministic, and raises,
    as ``simulate``; ``OptionError`` if it would never end.
    """
    if until is None and all(job.steps is None for job in jobs):
        raise OptionError("jobs without a number of steps need an end: give until")
    world = _Simulation(jobs, in_flight)
    world.run(inf if until is None else until)
    world.cut()
    return world.runs
