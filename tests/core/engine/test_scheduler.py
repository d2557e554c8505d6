"""How a step ends, in cases written out; random events in any order are in ``policies/test_sharing_random.py``."""

from __future__ import annotations

import pytest

from asyncpipe.core.engine.events import (
    Abort,
    Outcome,
    StepCancelled,
    StepCompleted,
    StepFinished,
    StepSubmitted,
    TaskCompleted,
    TaskFailed,
    TaskIssued,
)
from asyncpipe.core.engine.scheduler import SchedulerState
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import Phase
from asyncpipe.core.records.step_record import remove_record
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError


def test_a_failure_after_the_step_finished_shows_when_it_completes() -> None:
    """An asynchronous device may fail after everything was issued."""
    graph, state = lower(find_schedule("gpipe"), Shape(1, 1, 1), phase=Phase.FORWARD), SchedulerState()
    state.handle(StepSubmitted(7, graph), 0.0)
    assert state.handle(TaskIssued(7, 0), 1.0) == [StepFinished(7, Outcome.OK)]
    error = RuntimeError("late")
    expected = [Abort(7), StepCompleted(7, Outcome.FAILED, 0, error)]
    assert state.handle(TaskFailed(7, 0, error), 2.0) == expected
    assert remove_record(state, 7).outcome is Outcome.FAILED


def test_a_cancellation_that_comes_too_late_changes_nothing() -> None:
    graph, state = lower(find_schedule("gpipe"), Shape(1, 1, 1), phase=Phase.FORWARD), SchedulerState()
    state.handle(StepSubmitted(0, graph), 0.0)
    assert state.handle(TaskIssued(0, 0), 1.0) == [StepFinished(0, Outcome.OK)]
    assert state.handle(StepCancelled(0), 2.0) == []
    assert state.handle(TaskCompleted(0, 0, 0.0, 3.0), 3.0) == [StepCompleted(0, Outcome.OK)]
    assert state.handle(StepCancelled(0), 4.0) == []
    assert remove_record(state, 0).outcome is Outcome.OK


@pytest.mark.parametrize("in_flight", [0, -1])
def test_a_lane_may_hold_a_task(in_flight: int) -> None:
    with pytest.raises(OptionError, match=f"in_flight must be a positive integer, got {in_flight}"):
        SchedulerState(in_flight=in_flight)
