"""Events (what happened), commands (what to do), and the journal of a step, which has both.

The scheduler handles an event, answers with commands, and writes both into the step's journal in that order. Times are
seconds of the caller's clock: ``time.perf_counter`` when a pipeline runs, virtual time in a simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.policies.share import Share

__all__ = [
    "Abort",
    "Command",
    "Dispatch",
    "Event",
    "GateOpened",
    "Journal",
    "Outcome",
    "ProgramEnded",
    "RunPrograms",
    "StepCancelled",
    "StepCompleted",
    "StepFinished",
    "StepSubmitted",
    "TaskCompleted",
    "TaskDropped",
    "TaskFailed",
    "TaskIssued",
]


class Outcome(StrEnum):
    """How a step ended."""

    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"


# Events: what happened.


@dataclass(frozen=True, slots=True)
class StepSubmitted:
    """A step wants to run ``graph``; ``step`` is a number never used before, ``share`` says whose it is."""

    step: int
    graph: TaskGraph
    share: Share = field(default_factory=Share)
    programs: bool = False
    """Whether every device can run its tasks by a program, if the scheduler has nothing to decide."""
    after: int | None = None
    """The step that this one follows on every device (``steps.py``). One that is completed
    changes nothing."""
    parts: int = 0
    """How many workers run it, each a part, and decide for their own lanes: then nothing is decided here, whatever the
    schedule and whose step it is. What happened is noted as for programs, and each part ends as a program does."""


@dataclass(frozen=True, slots=True)
class TaskIssued:
    """An asynchronous device has queued the task's kernels; it is not done yet."""

    step: int
    task: int
    seconds: float = field(default=0.0, compare=False)
    """How long the host was at it."""


class TaskCompleted(NamedTuple):
    """The task is done; it ran from ``started`` to ``ended``. On a CPU this stands for the issue as well.

    This and ``Dispatch`` are named tuples, because every task of a step makes one, and a frozen dataclass takes three
    times as long.
    """

    step: int
    task: int
    started: float
    ended: float


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The task raised ``error``."""

    step: int
    task: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class TaskDropped:
    """The executor did not run the task, because its step was aborted before."""

    step: int
    task: int


@dataclass(frozen=True, slots=True)
class ProgramEnded:
    """A device is at the end of its program, or has left it because the step was aborted."""

    step: int
    left: tuple[int, ...] = ()
    """The tasks that it did not begin."""


@dataclass(frozen=True, slots=True)
class GateOpened:
    """What a gate stands for is there; the task need not wait for it any longer. A step that ends early ignores it."""

    step: int
    gate: int
    """Its index in the graph's ``gates``; in a backward, the micro-batch whose gradient the caller has given."""


@dataclass(frozen=True, slots=True)
class StepCancelled:
    """Nobody wants the step any more."""

    step: int


# Commands: what to do.


class Dispatch(NamedTuple):
    """Hand the task to its device."""

    step: int
    task: int


@dataclass(frozen=True, slots=True)
class RunPrograms:
    """Hand each device its program of the step. ``Dispatch`` of its tasks is then only noted in the journal."""

    step: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Tell the devices to drop what they hold of this step and have not begun."""

    step: int


@dataclass(frozen=True, slots=True)
class StepFinished:
    """Every task is issued (``ok``), or the step is drained after an error or a cancellation."""

    step: int
    outcome: Outcome
    failed_task: int | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class StepCompleted:
    """Every device is done with the step; its journal is whole. It may have failed since it finished."""

    step: int
    outcome: Outcome
    failed_task: int | None = None
    error: BaseException | None = None


Event = (
    StepSubmitted | GateOpened | TaskIssued | TaskCompleted | TaskFailed | TaskDropped | ProgramEnded | StepCancelled
)
Command = Dispatch | RunPrograms | Abort | StepFinished | StepCompleted
Journal = Sequence[tuple[float, Event | Command]]
