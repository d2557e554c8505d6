"""What the controller and a worker say to each other of a step."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from asyncpipe.core.engine.events import TaskCompleted, TaskFailed, TaskIssued
from asyncpipe.core.records.compilations import Compilation
from asyncpipe.core.records.parts_record import TaskEvent
from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.core.records.worker_notes import WorkerUse
from asyncpipe.errors import EdgeError
from asyncpipe.runtime.workers.packed import Packed, pack, unpack
from asyncpipe.runtime.workers.remote_errors import portable_error, with_remote_text
from asyncpipe.shared_memory import Place

__all__ = ["Call", "EdgeBroken", "PartEnded", "PartJournal", "StartPart", "portable", "received"]


@dataclass(frozen=True, slots=True)
class StartPart:
    """Controller: run your part of a step."""

    pipeline: int
    step: int
    after: int | None
    """The step that it follows on every device."""
    work: Any = field(repr=False)
    """What it computes with, for whom runs it."""


@dataclass(frozen=True, slots=True)
class Call:
    """Controller: call a method of what runs a pipeline's steps in the worker. The answer is what it returns.

    ``stop(step)`` begins no more tasks of a step, and of those that follow it; ``settle(step, keep)`` keeps what a step
    has left in gradients and buffers, or undoes it. Others are known to who makes and serves the pipeline.
    """

    pipeline: int | None
    """``None``: all that there are."""
    method: str
    arguments: tuple[Any, ...] = field(default=(), repr=False)


class PartJournal(NamedTuple):
    """What happened in a part of a step. It is packed until somebody wants to know of single tasks."""

    completed: list[tuple[float, int, float, float]]
    """(when it was known, task, start, end); tasks have their numbers in the part."""
    issued: list[tuple[float, int, float]]
    """(when it was known, task, seconds of the host)."""
    notes: StepNotes

    def packed(self) -> bytes:
        """For ``unpacked``."""
        return bytes(pack(tuple(self)).parts[0])

    @classmethod
    def unpacked(cls, packed: bytes) -> PartJournal:
        """What was ``packed``; nothing, if that is empty."""
        return cls(*unpack(Packed([memoryview(packed)]), _no_class)) if packed else cls([], [], StepNotes())

    def events(self, step: int, tasks: Sequence[int], offset: float) -> list[tuple[float, TaskEvent]]:
        """What became of the tasks, with the number in ``tasks`` of each, and times that are ``offset`` less."""
        found: list[tuple[float, TaskEvent]] = [
            (at - offset, TaskCompleted(step, tasks[task], started - offset, ended - offset))
            for at, task, started, ended in self.completed
        ]
        found += [(at - offset, TaskIssued(step, tasks[task], seconds)) for at, task, seconds in self.issued]
        return found


def _no_class(name: str) -> Any:
    raise LookupError(name)  # A journal has none of the controller's script.


@dataclass(frozen=True, slots=True)
class PartEnded:
    """Worker: nothing of the step runs here any more."""

    step: int
    completed: int = 0
    """How many tasks are done."""
    journal: bytes = field(default=b"", repr=False)
    """A packed ``PartJournal``, of what did not fail."""
    times: Mapping[tuple[str, int, int | None], tuple[int, float]] = field(default_factory=dict, repr=False)
    """How long tasks take here: ``JobAccount.means``."""
    compilations: Sequence[Compilation] = field(default=(), repr=False)
    failed: Sequence[tuple[float, TaskFailed]] = ()
    """Tasks that failed, with their numbers in the part, and when."""
    error: BaseException | None = None
    """Why the part did not run to its end, if not because it was stopped, and no task is to blame."""
    result: Any = field(default=None, repr=False)
    """What it has left for the caller of the step, if it has."""
    freed: Sequence[Place] = field(default=(), repr=False)
    """Where mini-batches of this step or earlier ones are not needed any more."""
    tracebacks: Sequence[str] = field(default=(), repr=False)
    """In the worker, of the errors above in their order."""
    use: WorkerUse | None = None
    """What the worker tells of itself, if somebody is to see it."""


@dataclass(frozen=True, slots=True)
class EdgeBroken:
    """Worker: an edge to another worker broke, which may be lost, or be there and out of reach."""

    pipeline: int
    error: EdgeError
    """With the names of both."""


def portable(worker: str, ended: PartEnded) -> PartEnded:
    """``ended`` with errors that can be pickled, and their tracebacks as text."""
    tracebacks: list[str] = []

    def carried(error: BaseException) -> BaseException:
        tracebacks.append("".join(traceback.format_exception(error)))
        return portable_error(worker, error)

    return _with_errors(ended, carried, tracebacks)


def received(worker: str, ended: PartEnded) -> PartEnded:
    """What ``portable`` has made, in the controller: its errors have their tracebacks in ``worker`` as their causes."""
    texts = iter(ended.tracebacks)
    return _with_errors(ended, lambda error: with_remote_text(worker, error, next(texts)), ())


def _with_errors(
    ended: PartEnded, change: Callable[[BaseException], BaseException], tracebacks: Sequence[str]
) -> PartEnded:
    failed = [(at, replace(event, error=change(event.error))) for at, event in ended.failed]
    error = None if ended.error is None else change(ended.error)
    return replace(ended, failed=failed, error=error, tracebacks=tracebacks)
