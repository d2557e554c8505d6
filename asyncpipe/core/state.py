"""Where tasks, lanes and steps stand. Mutated by ``SchedulerState`` alone (``core/scheduler.py``)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from asyncpipe.core.admission import Admission
from asyncpipe.core.events import Command, Event, Outcome
from asyncpipe.core.graph import TaskGraph
from asyncpipe.core.task import Lane

__all__ = ["LaneState", "StepState", "TaskState", "check_invariants"]


class TaskState(IntEnum):
    """Where a task of a running step stands."""

    WAITING = 0
    READY = 1
    DISPATCHED = 2
    ISSUED = 3
    COMPLETED = 4
    FAILED = 5
    DROPPED = 6


@dataclass(slots=True, eq=False)
class LaneState:
    """A lane's ready tasks, lowest (step, rank) first, and how many tasks its device holds."""

    lane: Lane
    ready: list[tuple[int, int, StepState]] = field(default_factory=list)
    """A task's rank is its number, unless a rule ranks it."""
    in_flight: int = 0


@dataclass(slots=True, eq=False)
class StepState:
    """One step under way."""

    number: int
    graph: TaskGraph
    lanes: list[LaneState]
    """The lane of each task."""
    unmet: list[int]
    """How many dependencies of each task still hold it back."""
    states: list[TaskState]
    journal: list[tuple[float, Event | Command]] = field(default_factory=list)
    outcome: Outcome = Outcome.OK
    failed_task: int | None = None
    error: BaseException | None = None
    to_issue: int = 0
    held: int = 0
    """Tasks dispatched and neither completed, failed nor dropped."""
    finished: bool = False
    closed_gates: set[int] = field(default_factory=set)
    """Micro-batches whose gradient the caller has not given yet."""
    admission: Admission | None = None
    """Of a ruled schedule."""

    def story(self, task: int) -> list[tuple[float, Event | Command]]:
        """What happened to a task, oldest first."""
        return [(at, event) for at, event in self.journal if getattr(event, "task", None) == task]

    @property
    def is_stuck(self) -> bool:
        """Whether a rule refuses everything although nothing runs: it would wait for ever."""
        if self.admission is None or self.held or not self.to_issue or self.outcome is not Outcome.OK:
            return False
        return not any(owner is self for lane in self.lanes for _, _, owner in lane.ready)


def check_invariants(steps: Iterable[StepState], lanes: Iterable[LaneState], cap: int) -> None:
    """Assert what must hold between two events, once ruled steps have settled."""
    held: dict[int, int] = {}
    for step in steps:
        counts = [step.states.count(state) for state in TaskState]
        assert step.held == counts[TaskState.DISPATCHED] + counts[TaskState.ISSUED], "held tasks are miscounted"
        for task, (state, lane) in enumerate(zip(step.states, step.lanes, strict=True)):
            if state in (TaskState.DISPATCHED, TaskState.ISSUED):
                held[id(lane)] = held.get(id(lane), 0) + 1
            if state is TaskState.WAITING and step.outcome is Outcome.OK:
                assert step.unmet[task] > 0, f"{step.graph.tasks[task]} waits for nothing"
    for lane in lanes:
        assert lane.in_flight == held.get(id(lane), 0), f"{lane.lane} is miscounted"
        assert lane.in_flight <= cap, f"{lane.lane} holds too many tasks"
        if lane.ready:
            rule = lane.ready[0][2].graph.rule
            room = cap if rule is None else min(cap, rule.ahead)
            assert lane.in_flight >= room, f"{lane.lane} has work and room, but stands still"
