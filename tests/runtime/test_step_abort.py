"""The order of flag, inbox and STOP, at interleavings of two devices, the driver's loop and who aborts.

Devices run the step's programs in the single instructions of ``device_thread.py``: whose turn is next is drawn. The
scheduler raises ``InvalidTransition`` for any event that cannot follow what it knows.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext

from driver_helpers import DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_scheduler

from asyncpipe.core.engine.events import (
    Abort,
    Outcome,
    StepCancelled,
    StepCompleted,
    StepSubmitted,
    TaskCompleted,
    TaskDropped,
    TaskFailed,
)
from asyncpipe.core.engine.scheduler import SchedulerState
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.programs import programs
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.runtime.program_run import ProgramRun
from asyncpipe.runtime.step_abort import StepAbort

GRAPH = lower(find_schedule("1f1b"), Shape(2, 2, 2), devices=DEVICES, checkpoint=CheckpointMode.NEVER)


class Handle:
    """A step, as its programs know it."""

    graph, tenant = GRAPH, None

    def __init__(self, number):
        self.number = number
        self.abort = StepAbort(number)


class System:
    """Two steps of the same devices, the second behind the first, and one turn for everybody at a time."""

    def __init__(self, faulty=None):
        self.scheduler = SchedulerState()
        self.inbox = deque()
        self.faulty = faulty
        self.steps = [Handle(0), Handle(1)]
        self.completed = {}
        self.queues = {device: deque() for device in range(len(DEVICES))}
        self.runs = []
        for step in self.steps:
            after = step.number - 1 if step.number else None
            if after is not None:
                assert self.steps[after].abort.precede(step.abort)
            self.scheduler.handle(StepSubmitted(step.number, GRAPH, programs=True, after=after), 0.0)
            before = {run.program.device: run for run in self.runs}
            runs = [
                ProgramRun(
                    *(step, program, None, nullcontext(), 4),
                    self.queues[program.device].append,
                    before.get(program.device),
                )
                for program in programs(GRAPH).programs
            ]
            step.abort.runs = runs
            for run in runs:
                run.join(runs)
            self.runs += runs
        self.turns = [self.loop(), *(self.device(device) for device in range(len(DEVICES)))]

    def post(self, event, *, wake=True, at=None):
        self.inbox.append(event)

    def device(self, device):
        """``DeviceWork``: every ``yield`` is a place where another thread may go on."""
        runs = [run for run in self.runs if run.program.device == device]
        while runs:
            yield
            while self.queues[device]:
                run, place = self.queues[device].popleft()
                run.receive(place)
            run = next((run for run in runs if run.can_go_on), None)
            if run is None:
                continue
            yield  # Between the flag and what is then done.
            if run.is_over:
                runs.remove(run)
                self.post(run.end())
                continue
            step, task, position = run.step, run.program.tasks[run.position], run.position
            run.position += 1
            yield  # The task runs.
            if (step.number, task) == self.faulty:
                yield from requesting(step.abort, self.post, TaskFailed(step.number, task, ValueError()))
                continue
            self.post(TaskCompleted(step.number, task, 0.0, 1.0))
            yield
            run.release(position)

    def loop(self):
        """The driver's: one event at a time."""
        while len(self.completed) < len(self.steps):
            yield
            if not self.inbox:
                continue
            event = self.inbox.popleft()
            if isinstance(event, StepCancelled) and event.step in self.completed:
                continue
            for command in self.scheduler.handle(event, 0.0):
                if isinstance(command, Abort):
                    yield
                    self.steps[command.step].abort.confirm()
                elif isinstance(command, StepCompleted):
                    self.completed[command.step] = command
                    self.scheduler.remove(command.step)

    def cancel(self, number, at_once):
        """Who cancels: ``Driver.cancel``, or ``Driver.close``, which also stops the programs at once."""
        yield
        abort = self.steps[number].abort
        abort.cancel(self.post)
        yield
        if at_once:
            abort.confirm()

    def run(self, draw, *more):
        """Let ``draw`` say whose turn it is, as long as it likes; then all take turns until nothing is left."""
        turns = [*self.turns, *more]
        drawn = iter(draw)
        for _ in range(10_000):
            if not turns:
                break
            turn = turns[next(drawn, _) % len(turns)]
            try:
                next(turn)
            except StopIteration:
                turns.remove(turn)
        assert not turns, "it hangs"
        assert not self.inbox
        check_scheduler(self.scheduler)
        assert not self.scheduler._steps


def requesting(abort, post, event):
    """``StepAbort.request``. Under the lock only those take turns that do not wait for it: all but who aborts."""
    for step in abort._chain():
        step.is_requested = True
        yield
    post(event)


turns = st.lists(st.integers(0, 11), max_size=150)
tasks = st.integers(0, len(GRAPH.tasks) - 1)


@settings(max_examples=150, deadline=None)
@given(turns, st.integers(0, 1), tasks)
def test_a_fault(draw, number, task):
    system = System((number, task))
    system.run(draw)
    first, second = system.completed[0], system.completed[1]
    assert (first.outcome, second.outcome) == (
        (Outcome.FAILED, Outcome.CANCELLED) if number == 0 else (Outcome.OK, Outcome.FAILED)
    )
    assert (first, second)[number].failed_task == task


@settings(max_examples=150, deadline=None)
@given(turns, st.integers(0, 1), st.booleans())
def test_a_cancellation(draw, number, at_once):
    system = System()
    system.run(draw, system.cancel(number, at_once))
    outcomes = {0: system.completed[0].outcome, 1: system.completed[1].outcome}
    assert Outcome.FAILED not in outcomes.values()
    if outcomes[0] is Outcome.CANCELLED:
        assert outcomes[1] is Outcome.CANCELLED


def test_an_end_without_a_fault():
    system = System()
    system.run([])
    assert [end.outcome for end in system.completed.values()] == [Outcome.OK, Outcome.OK]


def test_the_flag_is_on_before_the_event_is_in_the_inbox_and_what_is_dropped_stands_behind_it():
    first, second = StepAbort(0), StepAbort(1)
    assert first.precede(second)
    seen = []

    def post(event, *, wake=True, at=None):
        assert first.is_requested
        assert second.is_requested
        seen.append(event)

    first.request(post, failed := TaskFailed(0, 3, ValueError()))
    second.drop(post, 4)
    first.cancel(post)  # Both have ended early already.
    assert seen == [failed, TaskDropped(1, 4)]


def test_nothing_begins_behind_a_step_that_ends_early():
    first, second = StepAbort(0), StepAbort(1)
    first.cancel(lambda event, **_: None)
    assert not first.precede(second)
    assert not second.is_requested
