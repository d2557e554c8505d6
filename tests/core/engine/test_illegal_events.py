"""An event that cannot follow what happened raises InvalidTransition with the task's story, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from invariants import check_scheduler

from asyncpipe.core.engine.events import (
    Abort,
    Event,
    ProgramEnded,
    StepCancelled,
    StepSubmitted,
    TaskCompleted,
    TaskDropped,
    TaskFailed,
    TaskIssued,
)
from asyncpipe.core.engine.scheduler import SchedulerState
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.records.step_record import remove_record
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import InvalidTransition

STEP = 5
ERROR = RuntimeError("boom")


def completed(task: int, step: int = STEP) -> TaskCompleted:
    return TaskCompleted(step, task, 0.0, 1.0)


# Tasks 0 and 2, F(0,0) and F(1,0), are dispatched at once; the last one, B(0,0), waits for all others.
GRAPH = lower(find_schedule("gpipe"), Shape(2, 2, 2))
LAST = len(GRAPH.tasks) - 1

BY_PROGRAMS = StepSubmitted(STEP, GRAPH, programs=True)
DEVICE_0 = tuple(task.number for task in GRAPH.tasks if task.lane.device == GRAPH.devices[0])
DEVICE_1 = tuple(task.number for task in GRAPH.tasks if task.lane.device != GRAPH.devices[0])

ILLEGAL: dict[str, tuple[list[Event], Event, str]] = {
    "completed before dispatched": ([], completed(LAST), "came while B(0,0) is waiting"),
    "issued before dispatched": ([], TaskIssued(STEP, LAST), "came while B(0,0) is waiting"),
    "failed before dispatched": ([], TaskFailed(STEP, LAST, ERROR), "came while B(0,0) is waiting"),
    "dropped before dispatched": ([], TaskDropped(STEP, LAST), "came while B(0,0) is waiting"),
    "completed twice": ([completed(0)], completed(0), "came while F(0,0) is completed"),
    "issued twice": ([TaskIssued(STEP, 0)], TaskIssued(STEP, 0), "came while F(0,0) is issued"),
    "issued after completed": ([completed(0)], TaskIssued(STEP, 0), "came while F(0,0) is completed"),
    "failed after completed": ([completed(0)], TaskFailed(STEP, 0, ERROR), "came while F(0,0) is completed"),
    "failed twice": ([TaskFailed(STEP, 0, ERROR)], TaskFailed(STEP, 0, ERROR), "came while F(0,0) is failed"),
    "completed after failed": ([TaskFailed(STEP, 0, ERROR)], completed(0), "came while F(0,0) is failed"),
    "dropped while running": ([], TaskDropped(STEP, 0), "although step 5 is not aborted"),
    "dropped after issued": (
        [TaskIssued(STEP, 0), StepCancelled(STEP)],
        TaskDropped(STEP, 0),
        "came while F(0,0) is issued",
    ),
    "dropped twice": (
        [StepCancelled(STEP), TaskDropped(STEP, 0)],
        TaskDropped(STEP, 0),
        "came while F(0,0) is dropped",
    ),
    "completed after dropped": ([StepCancelled(STEP), TaskDropped(STEP, 0)], completed(0), "F(0,0) is dropped"),
    "unknown step": ([], completed(0, step=6), "came for a step that is not under way"),
    "unknown task": ([], completed(LAST + 1), "came for a task that step 5 does not have"),
    "negative task": ([], completed(-1), "came for a task that step 5 does not have"),
    "resubmitted step": ([], StepSubmitted(STEP, GRAPH), "step 5 was submitted before, or after a later one"),
    "older step": ([], StepSubmitted(STEP - 1, GRAPH), "step 4 was submitted before, or after a later one"),
    "unknown step cancelled": ([], StepCancelled(6), "step 6 is not under way"),
    "end of another step": ([BY_PROGRAMS], ProgramEnded(6), "came for a step of which no device runs a program"),
    "end of no program": ([], ProgramEnded(STEP), "of which no device runs a program"),
    "tasks left of a running step": ([BY_PROGRAMS], ProgramEnded(STEP, (LAST,)), "although step 5 is not aborted"),
    "nothing run": ([BY_PROGRAMS, ProgramEnded(STEP)], ProgramEnded(STEP), "although step 5 is not aborted"),
    "a task left that has run": (
        [BY_PROGRAMS, completed(0), StepCancelled(STEP)],
        ProgramEnded(STEP, DEVICE_0),
        "although task 0 was begun",
    ),
    "a task left that is issued": (
        [BY_PROGRAMS, TaskIssued(STEP, 0), StepCancelled(STEP)],
        ProgramEnded(STEP, DEVICE_0),
        "although task 0 was begun",
    ),
    "a task left that is none": (
        [BY_PROGRAMS, StepCancelled(STEP)],
        ProgramEnded(STEP, (LAST + 1,)),
        f"although task {LAST + 1} was begun, or is none of the step's",
    ),
    "a task left that is negative": ([BY_PROGRAMS, StepCancelled(STEP)], ProgramEnded(STEP, (-1,)), "task -1 was"),
    "a task dispatched for ever": (
        [BY_PROGRAMS, StepCancelled(STEP), ProgramEnded(STEP)],
        ProgramEnded(STEP),
        "came while F(0,0) is dispatched",
    ),
    "a third of two": (
        [
            BY_PROGRAMS,
            TaskIssued(STEP, 0),
            StepCancelled(STEP),
            ProgramEnded(STEP, DEVICE_0[1:]),
            ProgramEnded(STEP, DEVICE_1),
        ],
        ProgramEnded(STEP),
        "of which no device runs a program",
    ),
}


def begun(*events: Event) -> SchedulerState:
    """After these events, behind the submission of the step if they have none."""
    state = SchedulerState()
    for event in events if BY_PROGRAMS in events else [StepSubmitted(STEP, GRAPH), *events]:
        state.handle(event, 0.0)
    return state


def snapshot(state: SchedulerState) -> Any:
    """Everything the scheduler remembers, as plain values."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        name = type(value).__name__
        if name == "Flow":
            return (
                value.job.name,
                [entry[:3] for entry in value.ready.heap],
                value.in_flight,
                value.virtual,
                value.expected,
            )
        if name == "LaneState":
            return str(value.lane), value.in_flight, type(value.policy), plain(getattr(value.policy, "_flows", {}))
        if name in ("StepState", "JobAccount"):
            return {slot: plain(getattr(value, slot)) for slot in value.__slots__}
        if name in ("Jobs", "Dispatcher"):
            return {slot: plain(item) for slot, item in vars(value).items()}
        return value

    return {name: plain(value) for name, value in vars(state).items() if not callable(value)}


@pytest.mark.promise(
    "Everything ends",
    "The controller rejects every event that its state does not allow, and its state does not change.",
)
@pytest.mark.parametrize(("before", "event", "message"), ILLEGAL.values(), ids=ILLEGAL.keys())
def test_an_illegal_event_changes_nothing(before: list[Event], event: Event, message: str) -> None:
    state = begun(*before)
    remembered = snapshot(state)
    with pytest.raises(InvalidTransition) as raised:
        state.handle(event, 9.0)
    assert message in str(raised.value)
    assert snapshot(state) == remembered
    check_scheduler(state)


def test_a_snapshot_sees_every_event() -> None:
    """The test above can fail: any legal event changes the snapshot."""
    state = begun()
    before = snapshot(state)
    state.handle(completed(0), 1.0)
    assert snapshot(state) != before


def test_a_step_is_gone_with_its_record() -> None:
    state = begun(StepCancelled(STEP), TaskDropped(STEP, 0), TaskDropped(STEP, 2))
    assert Abort(STEP) in [entry for _, entry in remove_record(state, STEP).journal]
    with pytest.raises(InvalidTransition, match="step 5 is not completed"):
        remove_record(state, STEP)
    with pytest.raises(InvalidTransition, match="not under way"):
        state.handle(StepCancelled(STEP), 0.0)
    with pytest.raises(InvalidTransition, match="submitted before"):
        state.handle(StepSubmitted(STEP, GRAPH), 0.0)
