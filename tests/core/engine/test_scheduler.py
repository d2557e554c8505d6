"""The scheduler's guarantees, held against a model of its own: random graphs, random legal events, every order.

The model knows graphs and events, and nothing of how the scheduler keeps its books.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_ordered_graph

from asyncpipe.core.engine.events import (
    Abort,
    Command,
    Dispatch,
    Event,
    GateOpened,
    Outcome,
    StepCancelled,
    StepCompleted,
    StepFinished,
    StepSubmitted,
    TaskCompleted,
    TaskDropped,
    TaskFailed,
    TaskIssued,
)
from asyncpipe.core.engine.scheduler import SchedulerState
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import Lane
from asyncpipe.core.graph.task_graph import Phase, TaskGraph
from asyncpipe.core.records.step_record import remove_record
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError


@dataclass
class Model:
    """What a step must look like from outside."""

    number: int
    graph: TaskGraph
    dispatched: list[int] = field(default_factory=list)
    issued: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    opened: set[int] = field(default_factory=set)
    failed: list[tuple[int, BaseException]] = field(default_factory=list)
    outcome: Outcome = Outcome.OK
    ends: list[Command] = field(default_factory=list)
    log: list[tuple[float, Event | Command]] = field(default_factory=list)

    def is_ready(self, task: int) -> bool:
        if self.outcome is not Outcome.OK or task in self.dispatched:
            return False
        tasks = self.graph.tasks
        if task in self.graph.gates and tasks[task].microbatch not in self.opened:
            return False
        return all(
            before in (self.dispatched if tasks[before].lane.device == tasks[task].lane.device else self.issued)
            for before in self.graph.dependencies[task]
        )

    @property
    def is_drained(self) -> bool:
        return not self.held and (self.outcome is not Outcome.OK or len(self.issued) == len(self.graph.tasks))

    @property
    def is_finished(self) -> bool:
        return self.is_drained or len(self.issued) == len(self.graph.tasks)


class World:
    """Steps, scheduler and devices; ``send`` checks every answer of the scheduler."""

    def __init__(self, draw: random.Random, steps: int, failures: bool, cancellations: bool) -> None:
        self.draw = draw
        self.cap = draw.choice([1, 1, 2, 3, 16])
        self.state = SchedulerState(in_flight=self.cap)
        self.to_submit = [random_ordered_graph(draw) for _ in range(steps)]
        self.models: dict[int, Model] = {}
        self.failures = failures
        self.cancellations = cancellations
        self.now = 0.0
        self.next_step = 0

    def run(self) -> None:
        while choices := list(self.choices()):
            self.send(self.draw.choice(choices))
        assert all(model.ends for model in self.models.values())
        for model in self.models.values():
            record = remove_record(self.state, model.number)
            assert record.journal == model.log, "the journal is every event and command, in order"
            assert (record.graph, record.outcome) == (model.graph, model.outcome)
        assert self.state.idle
        self.state.check()

    def choices(self) -> Iterable[Event]:
        """Every legal event, ends of tasks more likely than troubles."""
        if self.to_submit:
            yield StepSubmitted(self.next_step, self.to_submit[-1])
        for model in self.models.values():
            for task in sorted(model.held):
                yield TaskCompleted(model.number, task, self.now, self.now)
                if task not in model.issued:
                    yield TaskIssued(model.number, task)
                    if model.outcome is not Outcome.OK:
                        yield TaskDropped(model.number, task)
                if self.failures and self.draw.random() < 0.1:
                    yield TaskFailed(model.number, task, RuntimeError(f"{model.number}.{task}"))
            if not model.is_drained:
                yield from (GateOpened(model.number, i) for i in sorted(self.closed_gates(model)))
            if self.cancellations and self.draw.random() < 0.05 and not model.is_drained:
                yield StepCancelled(model.number)

    def closed_gates(self, model: Model) -> set[int]:
        return set(range(len(model.graph.gates))) - model.opened

    def send(self, event: Event) -> None:
        self.now += 1.0
        commands = self.state.handle(event, self.now)
        self.state.check()
        aborted_before = {number for number, model in self.models.items() if model.outcome is not Outcome.OK}
        self.take(event)
        for command in commands:
            self.obey(command)
        self.check_ends(event, commands, aborted_before)
        assert not self.lanes_that_stand_still()

    def take(self, event: Event) -> None:
        if isinstance(event, StepSubmitted):
            self.models[event.step] = Model(event.step, event.graph, log=[(self.now, event)])
            self.to_submit.pop()
            self.next_step += self.draw.randint(1, 3)
            return
        model = self.models[event.step]
        model.log.append((self.now, event))
        if isinstance(event, StepCancelled):
            if model.outcome is Outcome.OK and not model.is_finished:
                model.outcome = Outcome.CANCELLED
            return
        if isinstance(event, GateOpened):
            model.opened.add(event.gate)
            return
        if isinstance(event, TaskIssued | TaskCompleted):
            model.issued.add(event.task)
        if not isinstance(event, TaskIssued):
            model.held.remove(event.task)
        if isinstance(event, TaskFailed):
            model.failed.append((event.task, event.error))
            if model.outcome is Outcome.OK:
                model.outcome = Outcome.FAILED

    def obey(self, command: Command) -> None:
        model = self.models[command.step]
        model.log.append((self.now, command))
        if isinstance(command, StepFinished | StepCompleted):
            model.ends.append(command)
        elif isinstance(command, Dispatch):
            self.dispatch(model, command.task)

    def dispatch(self, model: Model, task: int) -> None:
        assert task not in model.dispatched, "each task is dispatched at most once"
        assert model.outcome is Outcome.OK, "nothing of an aborted step is dispatched"
        assert model.is_ready(task), "remote dependencies are issued, local ones dispatched"
        lane = model.graph.tasks[task].lane
        assert (model.number, task) == min(self.ready(lane)), "older steps first, then lower numbers"
        model.dispatched.append(task)
        model.held.add(task)
        assert self.held(lane) <= self.cap, "the cap holds over all steps"

    def ready(self, lane: Lane) -> list[tuple[int, int]]:
        return [
            (model.number, task.number)
            for model in self.models.values()
            for task in model.graph.tasks
            if task.lane == lane and model.is_ready(task.number)
        ]

    def held(self, lane: Lane) -> int:
        return sum(model.graph.tasks[task].lane == lane for model in self.models.values() for task in model.held)

    def lanes_that_stand_still(self) -> list[Lane]:
        lanes = {lane for model in self.models.values() for lane in model.graph.lanes}
        return [lane for lane in lanes if self.held(lane) < self.cap and self.ready(lane)]

    def check_ends(self, event: Event, commands: list[Command], aborted_before: set[int]) -> None:
        model = self.models[event.step]
        new = {number for number, other in self.models.items() if other.outcome is not Outcome.OK} - aborted_before
        assert [command for command in commands if isinstance(command, Abort)] == [Abort(number) for number in new]
        kinds = [type(end) for end in model.ends]
        assert kinds == [StepFinished, StepCompleted][: model.is_finished + model.is_drained]
        ends = [command for command in commands if isinstance(command, StepFinished | StepCompleted)]
        assert commands[len(commands) - len(ends) :] == ends, "ends come behind everything else"
        first = model.failed[0] if model.failed else (None, None)
        for end in ends:
            assert (end.step, end.outcome, end.failed_task, end.error) == (model.number, model.outcome, *first)


worlds = st.randoms(use_true_random=False)


@settings(max_examples=60)
@given(worlds, st.integers(1, 3))
def test_steps_that_go_well(draw: random.Random, steps: int) -> None:
    world = World(draw, steps, failures=False, cancellations=False)
    world.run()
    for model in world.models.values():
        assert model.outcome is Outcome.OK
        assert sorted(model.dispatched) == list(range(len(model.graph.tasks)))


@settings(max_examples=80)
@given(worlds, st.integers(1, 3))
def test_steps_that_fail_or_are_cancelled_at_any_point(draw: random.Random, steps: int) -> None:
    World(draw, steps, failures=True, cancellations=True).run()


# Single cases, written out


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
