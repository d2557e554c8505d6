"""The seam between the scheduler and those who decide: which ready task of a lane comes next.

The scheduler knows steps, dependencies and lanes. For each lane it has one ``Policy``, which it tells what happens
there and asks what to run::

    begin(step) ─▶ ready(task) ─▶ choose() ─▶ started(task) ─▶ completed(task) ─▶ end(step)
                       ▲             │
                       └─────────────┘  a rule's admit refused it for now
                                        (drop(step) instead, if the step is aborted)

A policy of your own needs three methods::

    class LatestStepFirst(Policy):
        def __init__(self, lane):
            self.waiting = []

        def ready(self, step, task, now):
            self.waiting.append((step.number, -task, step))

        def choose(self, now):
            if not self.waiting:
                return None
            _, task, step = self.waiting.pop(self.waiting.index(max(self.waiting, key=lambda entry: entry[:2])))
            return step, -task

        def drop(self, step):
            self.waiting = [entry for entry in self.waiting if entry[2] is not step]

``DevicePool(devices, policy=LatestStepFirst)`` makes one for each lane. ``examples/deadline_policy`` is a whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import IntEnum
from typing import Protocol, TypeAlias

from asyncpipe.core.graph.task import Lane
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.policies.jobs import JobAccount

__all__ = ["Chosen", "LaneView", "MakePolicy", "Policy", "StepView", "TaskState"]


class TaskState(IntEnum):
    """Where a task of a running step stands."""

    WAITING = 0
    READY = 1
    DISPATCHED = 2
    ISSUED = 3
    COMPLETED = 4
    FAILED = 5
    DROPPED = 6


class LaneView(Protocol):
    """What a policy sees of its lane."""

    @property
    def lane(self) -> Lane:
        """Its device and queue."""

    @property
    def in_flight(self) -> int:
        """Tasks that the device holds: handed over and not completed. They cannot be taken back."""


class StepView(Protocol):
    """What a policy sees of a step under way."""

    @property
    def number(self) -> int:
        """Later steps have higher numbers."""

    @property
    def graph(self) -> TaskGraph:
        """All tasks, and what each waits for."""

    @property
    def job(self) -> JobAccount:
        """Whose step it is: name, share, and how long its tasks take."""

    @property
    def states(self) -> Sequence[TaskState]:
        """The state of each task, by its number."""

    @property
    def closed_gates(self) -> AbstractSet[int]:
        """The gates of the graph, by index, that are closed: what they stand for has not come from outside yet."""

    @property
    def running(self) -> bool:
        """Whether its tasks are still handed over: it neither failed nor was cancelled."""

    @property
    def behind(self) -> Mapping[int, Chosen]:
        """Those of its tasks that wait for a task of the step before it, each with that one; mostly empty."""


Chosen: TypeAlias = "tuple[StepView, int]"
"""A step and the number of one of its tasks."""


class Policy(Protocol):
    """Decides which ready task of one lane runs next. Inherit from it and write the first three methods.

    Called on the scheduler's thread; must be quick, and raise nothing. Times are seconds of the scheduler's clock. Only
    ``choose`` decides; the other methods tell what has happened.
    """

    @property
    def at_once(self) -> bool:
        """Whether the next choice need not wait until all that has happened is told; by default it waits."""
        return False

    def ready(self, step: StepView, task: int, now: float) -> None:
        """All that ``task`` waits for is done: it may be chosen from now on."""

    def choose(self, now: float) -> Chosen | None:
        """The next task, which the policy then forgets; ``None`` if there is none, or if waiting is better.

        Asked after something has happened, once all that is known has been told, and at ``wake_at``; again until it
        answers ``None`` or the lane holds as many tasks as it may. While no device runs anything, ``None`` without a
        ``wake_at`` ends every step with a ``PolicyError``: nobody would ask again.
        """

    def drop(self, step: StepView) -> None:
        """``step`` is aborted: forget those of its tasks that are ready."""

    def begin(self, step: StepView, now: float) -> None:
        """A step with tasks on this lane begins."""
        return

    def started(self, step: StepView, task: int, now: float) -> None:
        """The chosen ``task`` was handed to the device.

        It is not if a rule's ``admit`` refuses it: then ``ready`` comes again.
        """
        return

    def completed(self, step: StepView, task: int, seconds: float | None, now: float) -> None:
        """The device has done ``task`` in ``seconds``; ``None`` if it failed or was dropped, as its state says."""
        return

    def end(self, step: StepView, now: float) -> None:
        """Nothing of ``step`` is under way any more."""
        return

    def forget(self, job: JobAccount) -> None:
        """The job's last pipeline is closed: keep nothing of it."""
        return

    def wake_at(self, now: float) -> float | None:
        """When ``choose`` could answer otherwise although nothing has happened; ``None`` for never."""
        return None


MakePolicy: TypeAlias = Callable[[LaneView], Policy]
"""Makes the policy of one lane."""
