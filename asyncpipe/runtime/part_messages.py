"""What the controller and a worker say to each other of a step."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncpipe.core.engine.events import TaskCompleted, TaskFailed
from asyncpipe.core.records.parts_record import TaskEvent
from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.core.records.worker_notes import WorkerUse
from asyncpipe.errors import EdgeError
from asyncpipe.runtime.workers.remote_errors import portable_error, with_remote_text
from asyncpipe.shared_memory import Place

__all__ = ["Call", "EdgeBroken", "PartEnded", "StartPart", "on_clock", "portable", "received"]


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


@dataclass(frozen=True, slots=True)
class PartEnded:
    """Worker: nothing of the step runs here any more."""

    step: int
    events: Sequence[tuple[float, TaskEvent]] = field(repr=False)
    """What became of the tasks that began. Tasks have their numbers in the whole graph."""
    notes: StepNotes = field(repr=False)
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


def on_clock(ended: PartEnded, offset: float) -> PartEnded:
    """``ended`` with times that are ``offset`` seconds less: those of the controller's clock."""
    if not offset:
        return ended

    def moved(event: TaskEvent) -> TaskEvent:
        if isinstance(event, TaskCompleted):
            return event._replace(started=event.started - offset, ended=event.ended - offset)
        return event

    events = [(at - offset, moved(event)) for at, event in ended.events]
    return replace(ended, events=events, notes=ended.notes.shifted(-offset))


def _with_errors(
    ended: PartEnded, change: Callable[[BaseException], BaseException], tracebacks: Sequence[str]
) -> PartEnded:
    events = [
        (at, replace(event, error=change(event.error)) if isinstance(event, TaskFailed) else event)
        for at, event in ended.events
    ]
    error = None if ended.error is None else change(ended.error)
    return replace(ended, events=events, error=error, tracebacks=tracebacks)
