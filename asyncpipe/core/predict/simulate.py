"""Simulation: the real scheduler on virtual time, for one step, steps that overlap, or jobs on the same lanes.

On a topology (costs are ``TopologyCosts``), what a copy brings is a message. It leaves when it is made, waits for its
link, and is there at a time that the record notes (``StepNotes.arrived``), as records of real workers do. The copy
then takes no time, and keeps no other from arriving. A and G wait for a message from each other replica at a gate, as
in the part of a worker (``core/graph/part.py``), so their lanes are free meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from asyncpipe.core.engine.events import Command, Dispatch, GateOpened, StepCompleted, StepSubmitted, TaskCompleted
from asyncpipe.core.engine.scheduler import SchedulerState
from asyncpipe.core.graph.task import Lane, Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import COLLECTIVE_KINDS, TaskKind
from asyncpipe.core.policies.policy import MakePolicy
from asyncpipe.core.policies.share import Share
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.topology import TopologyCosts
from asyncpipe.core.records.step_record import StepRecord, remove_record
from asyncpipe.errors import OptionError

__all__ = ["SimulatedJob", "SimulatedRun", "can_overlap", "simulate", "simulate_jobs", "simulate_steps"]


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """A job for ``simulate_jobs``: it runs steps of one graph, one after the other or overlapping."""

    graph: TaskGraph
    cost: Callable[[Task], float] = field(default_factory=Costs)
    share: Share = field(default_factory=Share)
    steps: int | None = 1
    """The number of steps; with ``None`` the job runs until all jobs that have a number are done."""
    pause: float = 0.0
    """Seconds between the end of a step and the next one, for example for the optimizer and the next batch."""
    start: float = 0.0
    """The time at which the first step is submitted."""
    ahead: int = 0
    """How many steps are submitted behind the one under way, as ``Pipeline.steps`` does: each device begins a step when
    it has nothing left to begin of the one before. Where steps cannot overlap, they run one after the other."""

    def __post_init__(self) -> None:
        if self.ahead < 0:
            raise OptionError(f"ahead must be a number of steps, zero or more, got {self.ahead}")


@dataclass(slots=True, eq=False)
class SimulatedRun:
    """The result of one simulated job."""

    records: list[StepRecord] = field(default_factory=list)
    """The records of its completed steps."""
    seconds: dict[Lane, float] = field(default_factory=dict)
    """The time that it used on each lane until the end of the simulation, including an unfinished step."""


class _MessageOnLink(NamedTuple):
    task: int
    """The task that reads it: a copy, A or G."""
    source: int
    """The stage that sends it."""


class _Messages:
    """What other devices send in a step for copies, A and G: which tasks make it, and who waits for it."""

    def __init__(self, graph: TaskGraph) -> None:
        self.made_by: dict[int, list[_MessageOnLink]] = {}
        """By task, what it is needed for."""
        self.at_start: list[_MessageOnLink] = []
        """Copies of what is there when the step begins: tied parameters."""
        self.gates: dict[_MessageOnLink, int] = {}
        """The gate that a message for A or G opens."""
        self._parts: dict[_MessageOnLink, int] = {}
        """How many tasks make each message."""
        for task in graph.tasks:
            makers = graph.read_by(task.number)
            if task.kind is TaskKind.COPY:
                assert task.source is not None
                if not makers:
                    self.at_start.append(_MessageOnLink(task.number, task.source))
                sent = [(maker, _MessageOnLink(task.number, task.source)) for maker in makers]
            elif task.kind in COLLECTIVE_KINDS:
                stages = [(maker, graph.tasks[maker].stage) for maker in makers]
                sent = [(maker, _MessageOnLink(task.number, stage)) for maker, stage in stages if stage != task.stage]
                for _, message in sent:
                    self.gates.setdefault(message, len(graph.gates) + len(self.gates))
            else:
                continue
            for maker, message in sent:
                self.made_by.setdefault(maker, []).append(message)
                self._parts[message] = self._parts.get(message, 0) + 1
        gates = (*graph.gates, *(message.task for message in self.gates))
        self.graph = replace(graph, gates=gates) if self.gates else graph

    def of_step(self) -> dict[_MessageOnLink, int]:
        """How many tasks each message waits for, as a step begins."""
        return dict(self._parts)


class _Simulation:
    """Virtual lanes; each runs its tasks in the order of dispatch, as soon as their dependencies have ended."""

    def __init__(self, jobs: Sequence[SimulatedJob], in_flight: int, policy: MakePolicy | None) -> None:
        self.state = SchedulerState(in_flight=in_flight, policy=policy)
        self.runs = [SimulatedRun() for _ in jobs]
        self.now = 0.0
        self._jobs = jobs
        self._owner: list[int] = []
        """The index of the job of each step."""
        self._free: dict[Lane, float] = {}
        self._ends: list[dict[int, float]] = []
        """For each step, the time at which each dispatched task ends."""
        self._running: list[tuple[float, int, int, float]] = []
        """A heap of (end, step, task, start)."""
        self._ahead = [job.ahead if can_overlap(job.graph) else 0 for job in jobs]
        self._begins = [
            (job.start, number)
            for number, (job, ahead) in enumerate(zip(jobs, self._ahead, strict=True))
            for _ in range(1 + ahead if job.steps is None else min(1 + ahead, job.steps))
        ]
        """A heap of (time, job) for steps to submit."""
        heapify(self._begins)
        self._left = [inf if job.steps is None else job.steps for job in jobs]
        """The steps of each job that are not completed."""
        self._last: dict[int, int] = {}
        """The last step of each job, if it was submitted."""
        self._messages = [_Messages(job.graph) if isinstance(job.cost, TopologyCosts) else None for job in jobs]
        self._unsent: list[dict[_MessageOnLink, int]] = []
        """For each step, how many tasks each message waits for."""
        self._openings: list[tuple[float, int, int]] = []
        """A heap of (time, step, gate)."""
        self._arrived: list[dict[int, float]] = []
        self._channels: dict[tuple[str, ...], float] = {}
        """The time from which each link is free."""

    def run(self) -> None:
        """Simulate until all numbered steps are completed."""
        commands: list[Command] = []
        while True:
            self._execute(commands)
            if self._is_done():
                return
            # Policies choose after all events of this moment, including copies that take no time.
            commands = [] if self._next() <= self.now else self.state.choose(self.now)
            if commands:
                continue
            wake_at = self.state.wake_at(self.now)
            upcoming = min(self._next(), inf if wake_at is None else wake_at)
            assert upcoming < inf, "steps are unfinished, but no task is running"
            self.now = max(self.now, upcoming)
            commands = self._advance()

    def _next(self) -> float:
        return min((heap[0][0] for heap in (self._running, self._openings, self._begins) if heap), default=inf)

    def _is_done(self) -> bool:
        numbered = [left for left in self._left if left != inf]
        return bool(numbered) and not any(numbered)

    def _advance(self) -> list[Command]:
        """Handle the next event of this moment, if any: ends of tasks in the order of their numbers, then messages for
        A and G, then new steps."""
        if self._running and self._running[0][0] <= self.now:
            end, step, task, start = heappop(self._running)
            self._send_what_made(step, task)
            return self.state.handle(TaskCompleted(step, task, start, end), self.now)
        if self._openings and self._openings[0][0] <= self.now:
            _, step, gate = heappop(self._openings)
            return self.state.handle(GateOpened(step, gate), self.now)
        if self._begins and self._begins[0][0] <= self.now:
            return self._begin(heappop(self._begins)[1])
        return []

    def _begin(self, number: int) -> list[Command]:
        job, step = self._jobs[number], len(self._owner)
        self._owner.append(number)
        self._ends.append({})
        messages = self._messages[number]
        self._unsent.append({} if messages is None else messages.of_step())
        self._arrived.append({})
        for message in () if messages is None else messages.at_start:
            self._send(step, message)
        after = self._last.get(number) if self._ahead[number] else None
        self._last[number] = step
        graph = job.graph if messages is None else messages.graph
        commands = self.state.handle(StepSubmitted(step, graph, job.share, after=after), self.now)
        for gate in range(len(job.graph.gates)):
            commands += self.state.handle(GateOpened(step, gate), self.now)
        return commands

    def _execute(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Dispatch):
                self._dispatch(command)
            elif isinstance(command, StepCompleted):
                self._complete(command)

    def _dispatch(self, command: Dispatch) -> None:
        job, ends = self._jobs[self._owner[command.step]], self._ends[command.step]
        task = job.graph.tasks[command.task]
        before = [ends[dependency] for dependency in job.graph.dependencies[command.task]]
        arrived = self._arrived[command.step].get(command.task)
        if arrived is None or task.kind is not TaskKind.COPY:
            start = max(self.now, self._free.get(task.lane, 0.0), *before)
            end = start + job.cost(task)
            self._free[task.lane] = end
        else:
            start = end = max(self.now, arrived, *before)
        ends[command.task] = end
        heappush(self._running, (end, command.step, command.task, start))
        seconds = self.runs[self._owner[command.step]].seconds
        seconds[task.lane] = seconds.get(task.lane, 0.0) + end - start

    def _send_what_made(self, step: int, task: int) -> None:
        """Send the messages that ``task``, which is done now, was the last to make."""
        messages = self._messages[self._owner[step]]
        if messages is not None:
            unsent = self._unsent[step]
            for message in messages.made_by.get(task, ()):
                unsent[message] -= 1
                if not unsent[message]:
                    arrives = self._send(step, message)
                    if message in messages.gates:
                        heappush(self._openings, (arrives, step, messages.gates[message]))

    def _send(self, step: int, message: _MessageOnLink) -> float:
        """Send ``message`` now, and return when it is there."""
        job = self._jobs[self._owner[step]]
        task, graph, cost = job.graph.tasks[message.task], job.graph, job.cost
        assert isinstance(cost, TopologyCosts)
        channel, link = cost.route(graph.devices[graph.placement[message.source]], task.lane.device)
        free = max(self.now, self._channels.get(channel, 0.0)) + cost.size(task) / link.bandwidth
        self._channels[channel] = free
        arrived = self._arrived[step]
        arrived[message.task] = max(arrived.get(message.task, 0.0), free + link.latency)
        return free + link.latency

    def _complete(self, end: StepCompleted) -> None:
        if end.error is not None:
            raise end.error
        number = self._owner[end.step]
        graph, record = self._jobs[number].graph, remove_record(self.state, end.step)
        journal = [entry for entry in record.journal if not _is_of_messages(entry[1], graph)]
        record = replace(record, graph=graph, journal=journal)
        record.notes.arrived.update(self._arrived[end.step])
        self.runs[number].records.append(record)
        self._ends[end.step], self._unsent[end.step], self._arrived[end.step] = {}, {}, {}
        self._left[number] -= 1
        if self._left[number] > self._ahead[number]:
            heappush(self._begins, (self.now + self._jobs[number].pause, number))

    def cut(self) -> None:
        """Subtract from the lanes' seconds what running tasks have left at the end of the simulation."""
        for end, step, task, start in self._running:
            job = self._jobs[self._owner[step]]
            self.runs[self._owner[step]].seconds[job.graph.tasks[task].lane] -= end - max(start, min(end, self.now))


def _is_of_messages(event: object, graph: TaskGraph) -> bool:
    """Whether ``event`` is a gate's that only the simulation has."""
    return isinstance(event, GateOpened) and event.gate >= len(graph.gates)


def can_overlap(graph: TaskGraph) -> bool:
    """Whether steps of ``graph`` may overlap: not if a rule decides, nor if copies of tied parameters begin a step.

    A rule does not say which task of a device is the last, and such a copy would come before the owner's update.
    """
    return graph.rule is None and not graph.wiring.ties


def simulate(graph: TaskGraph, cost: Callable[[Task], float] | None = None, *, in_flight: int = 16) -> StepRecord:
    """The record of one step of ``graph`` with the given costs (``Costs()`` by default), from time 0.

    Deterministic: tasks that end at the same virtual time are reported in the order of their numbers. What a ruled
    schedule raises while it decides becomes a ``ScheduleError``.
    """
    (run,) = simulate_jobs([SimulatedJob(graph, cost or Costs())], in_flight=in_flight)
    return run.records[0]


def simulate_steps(
    graph: TaskGraph, cost: Callable[[Task], float] | None = None, *, steps: int, ahead: int = 1
) -> list[StepRecord]:
    """The records of ``steps`` steps of ``graph`` on one clock, of which up to ``ahead`` are submitted early.

    Otherwise as ``simulate``. With ``ahead=0`` each step begins when the one before has ended.
    """
    (run,) = simulate_jobs([SimulatedJob(graph, cost or Costs(), steps=steps, ahead=ahead)])
    return run.records


def simulate_jobs(
    jobs: Sequence[SimulatedJob], *, in_flight: int = 16, policy: MakePolicy | None = None
) -> list[SimulatedRun]:
    """The results of ``jobs`` that run together with the given costs, from time 0; one for each job.

    Ends when every job with a number of steps has completed them. Deterministic, and raises, as ``simulate``; also
    ``OptionError`` if the simulation would never end. ``policy`` is that of a ``DevicePool``.
    """
    if all(job.steps is None for job in jobs):
        raise OptionError("the simulation would never end; give one of the jobs a number of steps")
    simulation = _Simulation(jobs, in_flight, policy)
    simulation.run()
    simulation.cut()
    return simulation.runs
