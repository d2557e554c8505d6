"""Steps behind each other: a device goes over to the next step when it has all compute tasks of the one before."""

from __future__ import annotations

import pytest
from sharing_helpers import ByHand, dispatched

from asyncpipe.core.engine.events import (
    Outcome,
    ProgramEnded,
    StepCancelled,
    StepCompleted,
    StepFinished,
    StepSubmitted,
    TaskCompleted,
    TaskIssued,
)
from asyncpipe.core.engine.scheduler import SchedulerState
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import WHOLE_STEP, Lane, Queue
from asyncpipe.core.graph.task_graph import Wiring
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.policies.share import Share
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import InvalidTransition

UPDATED = lower(find_schedule("1f1b"), Shape(2, 4, 2), wiring=Wiring(((0, 1),), (), (0, 1)))


Tasks = list[tuple[int, int]]
"""(step, task)"""


def run(scheduler: ByHand, queue: Tasks, held: tuple[int, int] | None = None) -> tuple[Tasks, Tasks]:
    """Complete what is handed over, each device in that order. Returns what ran, and what is behind ``held``."""
    ran: Tasks = []
    left: Tasks = []
    for step, task in queue:  # It grows meanwhile.
        stuck = {UPDATED.tasks[other].lane.device for _, other in left}
        if (step, task) == held or UPDATED.tasks[task].lane.device in stuck:
            left.append((step, task))
        else:
            ran.append((step, task))
            queue += dispatched(scheduler.send(TaskCompleted(step, task, 0.0, 0.0), 0.0))
    return ran, left


@pytest.mark.parametrize("job", ["", "a"])
def test_a_device_at_its_end_does_not_wait_for_the_others(job: str) -> None:
    """And it computes for the later step behind everything of the earlier one."""
    scheduler = ByHand()
    update = 0, UPDATED.find(TaskKind.UPDATE, WHOLE_STEP, 1).number
    commands = scheduler.send(StepSubmitted(0, UPDATED, Share(job)), 0.0)
    commands += scheduler.send(StepSubmitted(1, UPDATED, Share(job), after=0), 0.0)
    begun, left = run(scheduler, dispatched(commands), update)
    ran = {UPDATED.tasks[task].id for step, task in begun if step == 1}
    # Nothing ran yet that needs the stage whose update is late.
    assert {"F(0,0)", "F(1,0)"} <= ran
    assert not any(",1)" in task for task in ran if not task.startswith("C"))
    begun += run(scheduler, left)[0]
    assert len(begun) == 2 * len(UPDATED.tasks)
    for device in UPDATED.devices:
        lanes = [(step, UPDATED.tasks[task].lane) for step, task in begun]
        steps = [step for step, lane in lanes if lane == Lane(device, Queue.COMPUTE)]
        assert steps == sorted(steps)


def test_single_tasks_wait_for_the_end_of_programs() -> None:
    """A job with a name joins, so the next step goes task by task: its tasks would overtake a program that waits."""
    scheduler = ByHand()
    scheduler.send(StepSubmitted(0, UPDATED, programs=True), 0.0)
    commands = scheduler.send(StepSubmitted(1, UPDATED, Share("a"), programs=True, after=0), 0.0)
    for task in range(len(UPDATED.tasks)):
        commands += scheduler.send(TaskCompleted(0, task, 0.0, 0.0), 0.0)
    commands += scheduler.send(ProgramEnded(0), 0.0)
    assert {command.step for command in commands} <= {0}
    commands = scheduler.send(ProgramEnded(0), 0.0)
    assert len(run(scheduler, dispatched(commands))[0]) == len(UPDATED.tasks)


@pytest.mark.parametrize("queued", [False, True], ids=["all done", "one only queued"])
def test_a_step_ends_with_its_programs_where_all_is_done(queued: bool) -> None:
    """Else whoever is told of its end would ask in vain for its record, which the ends of the programs complete."""
    scheduler, last = ByHand(), len(UPDATED.tasks) - 1
    scheduler.send(StepSubmitted(0, UPDATED, programs=True), 0.0)
    for task in range(last):
        scheduler.send(TaskCompleted(0, task, 0.0, 0.0), 0.0)
    commands = scheduler.send(TaskIssued(0, last, 0.0) if queued else TaskCompleted(0, last, 0.0, 0.0), 0.0)
    assert [type(command) for command in commands] == [StepFinished] * queued
    commands = scheduler.send(ProgramEnded(0), 0.0) + scheduler.send(ProgramEnded(0), 0.0)
    if queued:
        assert not commands
        commands = scheduler.send(TaskCompleted(0, last, 0.0, 0.0), 0.0)
    assert [type(command) for command in commands] == [StepFinished] * (not queued) + [StepCompleted]


def test_a_cancel_is_too_late_when_all_is_done_and_programs_are_about_to_end() -> None:
    scheduler = ByHand()
    scheduler.send(StepSubmitted(0, UPDATED, programs=True), 0.0)
    for task in range(len(UPDATED.tasks)):
        scheduler.send(TaskCompleted(0, task, 0.0, 0.0), 0.0)
    assert not scheduler.send(StepCancelled(0), 0.0)
    *_, finished, completed = [*scheduler.send(ProgramEnded(0), 0.0), *scheduler.send(ProgramEnded(0), 0.0)]
    assert isinstance(finished, StepFinished)
    assert isinstance(completed, StepCompleted)
    assert completed.outcome is Outcome.OK


def test_what_cannot_be_followed_is_refused() -> None:
    ordered = lower(find_schedule("1f1b"), Shape(2, 2, 2))
    ruled = lower(find_schedule("backward-first"), Shape(2, 2, 2))
    state = SchedulerState()
    state.handle(StepSubmitted(0, ordered), 0.0)
    with pytest.raises(InvalidTransition, match="where a rule decides"):
        state.handle(StepSubmitted(1, ruled, after=0), 0.0)
    with pytest.raises(InvalidTransition, match="not submitted"):
        state.handle(StepSubmitted(1, ordered, after=1), 0.0)
    state.handle(StepSubmitted(1, ordered, after=0), 0.0)
    with pytest.raises(InvalidTransition, match="followed by another"):
        state.handle(StepSubmitted(2, ordered, after=0), 0.0)
    state.handle(StepCancelled(0), 0.0)
    with pytest.raises(InvalidTransition, match="not running"):
        state.handle(StepSubmitted(2, ordered, after=1), 0.0)
