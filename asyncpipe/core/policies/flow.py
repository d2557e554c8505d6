"""What one job has on one shared lane: its ready tasks, its virtual time, and when more is expected of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from asyncpipe.core.policies.first_come import FirstComeFirstServed
from asyncpipe.core.policies.jobs import JobAccount
from asyncpipe.core.policies.policy import StepView, TaskState

__all__ = ["Flow", "StepOnLane"]

PATIENCE = 0.25
"""The part of its own step's device time by which a flow must lag before a lane idles for it."""

_LAST_GAPS = 5


@dataclass(slots=True, eq=False, repr=False)
class StepOnLane:
    """One step of a named job on one lane."""

    step: StepView
    left: int
    """Tasks that are not done."""
    waiting: list[int]
    """Tasks that may still wait for others; of an ordered graph the next one is last."""
    seconds: float = 0.0
    """Device time of the tasks that are done."""

    def next_waiting(self) -> Sequence[int]:
        """The waiting tasks of which one can be the next on the lane.

        In an ordered graph that is the first one, since the others come after it; a rule may choose any.
        """
        states = self.step.states
        if self.step.graph.rule is not None:
            self.waiting = [task for task in self.waiting if states[task] is TaskState.WAITING]
            return self.waiting
        while self.waiting and states[self.waiting[-1]] is not TaskState.WAITING:
            self.waiting.pop()
        return self.waiting[-1:]


@dataclass(slots=True, eq=False, repr=False)
class Flow:
    """What one job has on one lane."""

    job: JobAccount
    background: bool
    """Of which class it is here: foreground and background have virtual times of their own."""
    virtual: float
    """Device seconds by weight: how much of its share the job has had."""
    ready: FirstComeFirstServed = field(default_factory=FirstComeFirstServed)
    in_flight: int = 0
    expected: float = 0.0
    """The seconds that its tasks in flight are expected to take; they are not charged yet."""
    completed_at: float = 0.0
    """When its last task here was done."""
    is_late: bool = False
    """Whether it stands: the first of its tasks in flight was issued, and should be done for long."""
    was_idle: bool = False
    """Whether it had nothing here, neither ready nor in flight, since it was last chosen."""
    step_seconds: float = 0.0
    """Device time of the last whole step."""
    steps: list[StepOnLane] = field(default_factory=list)
    """Those that are not done here, of a named job."""
    left_at: float | None = None
    """When the last step was done here, until a task of the next one is ready."""
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST_GAPS))
    """How long the lane had nothing of the job between two steps, the last few times."""

    @property
    def tag(self) -> float:
        """What is compared with other flows: the virtual time once all that is in flight is charged."""
        return self.virtual + self.expected / self.job.share.weight

    @property
    def due(self) -> float | None:
        """When the next step's first task is expected; ``None`` while a step is under way, or before the second one.

        By the median of the last gaps, since one of them may have been an evaluation or a snapshot.
        """
        return None if self.left_at is None or self.steps or not self.gaps else self.left_at + median(self.gaps)

    def is_active(self, now: float) -> bool:
        """Whether a step of the job is under way here, or expected soon."""
        if self.steps or (self.job.steps and not self.job.is_named):
            return True
        due = self.due
        return due is not None and self.left_at is not None and now - due < due - self.left_at

    def lags(self, other: Flow) -> bool:
        """Whether it is so far behind ``other`` that the lane may wait for it."""
        return self.tag + PATIENCE * self.step_seconds / self.job.share.weight < other.tag

    def next_seconds(self) -> float | None:
        """What its next task is expected to take; ``None`` if that is not known."""
        _, _, task, step = self.ready.heap[0]
        return self.job.expected(step.graph.tasks[task])

    def close(self, step: StepOnLane, now: float) -> None:
        """Note that a step is over here."""
        self.steps.remove(step)
        self.was_idle = True
        if not self.steps:
            self.left_at = now
