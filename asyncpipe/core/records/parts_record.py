"""The record of a step that several workers ran, from what each of them tells of its part.

Every worker has a scheduler of its own, which has checked what happened there. Here all of it is put into one order in
which it can have happened, and checked once more as a whole, by the scheduler that runs steps on threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

from asyncpipe.core.engine.events import (
    Command,
    Event,
    Outcome,
    ProgramEnded,
    StepCancelled,
    StepCompleted,
    StepFinished,
    StepSubmitted,
    TaskCompleted,
    TaskFailed,
    TaskIssued,
)
from asyncpipe.core.engine.scheduler import SchedulerState
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.policies.share import Share
from asyncpipe.core.records.step_record import StepRecord, remove_record

__all__ = ["TaskEvent", "WorkerPart", "parts_record"]

_ENDS = (StepFinished, StepCompleted)
TaskEvent = TaskIssued | TaskCompleted | TaskFailed


class WorkerPart(NamedTuple):
    """What one worker has run of a step."""

    tasks: frozenset[int]
    """The tasks of its devices. All numbers are of the whole graph."""
    events: Sequence[tuple[float, TaskEvent]]
    """What became of those that began, and when, in the worker's order."""


def parts_record(
    step: int,
    graph: TaskGraph,
    share: Share,
    submitted: float,
    parts: Sequence[WorkerPart],
    ended: float,
    error: BaseException | None = None,
    *,
    after: int | None = None,
) -> StepRecord:
    """The record of step number ``step``, begun at ``submitted`` and over at ``ended``, without notes.

    ``after`` is the step that it was begun behind, if that was under way.

    The step counts as failed by the first task that failed, or by ``error`` where no task is to blame, and as cancelled
    if tasks are left otherwise. Parts may be incomplete, since a worker was lost: then what can only have happened
    after something unknown is left out.
    """
    scheduler = SchedulerState()
    scheduler.handle(StepSubmitted(step, graph, share, parts=len(parts)), submitted)
    now = submitted
    happened: set[int] = set()
    failures: list[TaskFailed] = []
    for at, event in _possible(graph, parts):
        if isinstance(event, TaskFailed):
            failures.append(event)
        else:
            now = max(now, at)
            scheduler.handle(event, now)
            happened.add(event.task)
    # Last, since other workers go on until they hear of it.
    now = max(now, ended)
    for failure in failures:
        scheduler.handle(failure, now)
        happened.add(failure.task)
    if not failures and len(happened) < len(graph.tasks):
        scheduler.handle(StepCancelled(step), now)
    for part in parts:
        scheduler.handle(ProgramEnded(step, tuple(sorted(part.tasks - happened))), now)
    record = remove_record(scheduler, step)
    # Only now: the scheduler knows nothing of the step before, which has a record of its own.
    record = replace(record, journal=[(at, _behind(event, after)) for at, event in record.journal])
    return record if error is None or failures else _failed(record, error)


def _behind(event: Event | Command, after: int | None) -> Event | Command:
    return replace(event, after=after) if isinstance(event, StepSubmitted) else event


def _failed(record: StepRecord, error: BaseException) -> StepRecord:
    """``record``, ended by ``error``."""
    journal = [
        (at, replace(event, outcome=Outcome.FAILED, error=error) if isinstance(event, _ENDS) else event)
        for at, event in record.journal
    ]
    return replace(record, journal=journal, outcome=Outcome.FAILED)


def _possible(graph: TaskGraph, parts: Sequence[WorkerPart]) -> Iterator[tuple[float, TaskEvent]]:
    """All events by their times, each behind those of the tasks that it depends on; without any that lack these."""
    happened: set[int] = set()
    parked: dict[int, list[tuple[float, TaskEvent]]] = {}
    pending = sorted((each for part in parts for each in part.events), key=itemgetter(0), reverse=True)
    while pending:
        at, event = pending.pop()
        missing = next((task for task in graph.dependencies[event.task] if task not in happened), None)
        if missing is not None:
            parked.setdefault(missing, []).append((at, event))
            continue
        yield at, event
        if isinstance(event, TaskFailed):
            continue  # It may have sent something before it failed: what came of that is left out.
        happened.add(event.task)
        pending += reversed(parked.pop(event.task, ()))
