"""The record of a completed step, and who gets it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from asyncpipe.core.engine.events import Journal, Outcome
from asyncpipe.core.engine.scheduler import SchedulerState
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.records.step_notes import StepNotes

__all__ = ["FailureCounter", "Observer", "StepRecord", "remove_record"]


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """The whole journal of one step and the graph that it ran; metrics, traces and reports are folds over it."""

    step: int
    graph: TaskGraph
    journal: Journal
    outcome: Outcome
    notes: StepNotes = field(default_factory=StepNotes)


class Observer(Protocol):
    """Gets the record of every completed step. One that raises is logged and removed; training goes on."""

    def step_completed(self, record: StepRecord) -> None:
        """Called on the scheduler's loop, so it should only keep the record, and fold it on another thread."""


@runtime_checkable
class FailureCounter(Protocol):
    """An observer that also counts the failures of observers."""

    def observer_failed(self, reason: str) -> None:
        """An observer ``raised``, was ``slow``, or had a record ``dropped``; other sources have reasons of their own.

        Called on any thread.
        """


def remove_record(scheduler: SchedulerState, step: int) -> StepRecord:
    """The record of a completed step, which the scheduler then forgets; raises as ``SchedulerState.remove``."""
    state = scheduler.remove(step)
    return StepRecord(step, state.graph, state.journal, state.outcome, StepNotes(taken=state.taken))
