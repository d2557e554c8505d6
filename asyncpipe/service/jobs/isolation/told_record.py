"""The record of a step on its way to another process: its graph travels once, and the journal as plain numbers.

A record that is pickled as it is takes 3 µs for each event, most of it for looking up the same classes again.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncpipe.core.engine.events import (
    Command,
    Dispatch,
    Event,
    Outcome,
    StepCompleted,
    StepFinished,
    StepSubmitted,
    TaskCompleted,
    TaskFailed,
)
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.errors import RemoteError
from asyncpipe.runtime.workers.remote_errors import portable_error

__all__ = ["RecordReader", "RecordTeller", "ToldRecord"]

KNOWN = ("builtins", "asyncpipe", "torch")
"""Modules whose errors travel as they are."""
MOST_GRAPHS = 16
"""Graphs that both sides remember; a step of any other one brings it along."""


@dataclass(frozen=True, slots=True)
class ToldRecord:
    """What ``RecordReader`` makes a ``StepRecord`` of."""

    step: int
    place: int
    """Which of the remembered graphs it is."""
    graph: TaskGraph | None
    """The graph, if it is to be remembered at that place."""
    times: array[float]
    events: Sequence[Any]
    """By kind: the task of a ``Dispatch``, a triple of a ``TaskCompleted``, a list of a ``StepSubmitted``; any other as
    it is."""
    outcome: Outcome
    notes: StepNotes


def _of_class(name: str, process: str, text: str) -> RemoteError:
    """An error whose class is called ``name``: a job's own module need not be importable where it is read."""

    def reduce(_: RemoteError) -> tuple[Any, ...]:
        return _of_class, (name, process, text)

    made: RemoteError = type(name, (RemoteError,), {"__reduce__": reduce})(process, text)
    return made


class RecordTeller:
    """Makes records ready to be pickled, in the process where they are made."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._places: OrderedDict[TaskGraph, int] = OrderedDict()

    def told(self, record: StepRecord) -> ToldRecord:
        """``record``, whose errors are such that can be pickled."""
        place, is_new = self._place(record.graph)
        return ToldRecord(
            record.step,
            place,
            record.graph if is_new else None,
            array("d", [at for at, _ in record.journal]),
            [self._plain(event) for _, event in record.journal],
            record.outcome,
            record.notes,
        )

    def _place(self, graph: TaskGraph) -> tuple[int, bool]:
        if graph in self._places:
            self._places.move_to_end(graph)
            return self._places[graph], False
        place = len(self._places)
        if place >= MOST_GRAPHS:
            _, place = self._places.popitem(last=False)
        self._places[graph] = place
        return place, True

    def _told_error(self, error: BaseException) -> BaseException:
        """``error``, if the other process surely knows its class; or one that is called so."""
        if type(error).__module__.partition(".")[0] in KNOWN:
            return portable_error(self._process, error)
        return _of_class(type(error).__name__, self._process, str(error))

    def _plain(self, event: Event | Command) -> Any:
        match event:
            case Dispatch():
                return event.task
            case TaskCompleted():
                return event[1:]
            case StepSubmitted():
                return [event.share, event.programs, event.after, event.parts]
            case StepFinished() | StepCompleted() if event.error is not None:
                return replace(event, error=self._told_error(event.error))
            case TaskFailed():
                return replace(event, error=self._told_error(event.error))
            case _:
                return event


class RecordReader:
    """Makes records of what a ``RecordTeller`` has told, in its order."""

    def __init__(self) -> None:
        self._graphs: dict[int, TaskGraph] = {}

    def read(self, told: ToldRecord) -> StepRecord:
        """The record. Those of one graph have one graph, as those that were told."""
        if told.graph is not None:
            self._graphs[told.place] = told.graph
        graph, step = self._graphs[told.place], told.step

        def event_of(plain: Any) -> Event | Command:
            if type(plain) is int:
                return Dispatch(step, plain)
            if type(plain) is tuple:
                return TaskCompleted(step, *plain)
            if type(plain) is list:
                return StepSubmitted(step, graph, *plain)
            event: Event | Command = plain
            return event

        journal = [(at, event_of(plain)) for at, plain in zip(told.times, told.events, strict=True)]
        return StepRecord(step, graph, journal, told.outcome, told.notes)
