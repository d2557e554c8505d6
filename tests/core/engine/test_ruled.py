"""Ruled and hinted schedules: decided while the step runs, never stuck, never above their cap."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_ruled_graph
from shapes import DEVICES, MICROBATCHES
from sharing_helpers import ByHand

from asyncpipe.core.engine.events import (
    Abort,
    Command,
    Dispatch,
    GateOpened,
    Outcome,
    StepCompleted,
    StepFinished,
    StepSubmitted,
    TaskCompleted,
)
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.part import part
from asyncpipe.core.graph.task import WHOLE_STEP, Queue, Task
from asyncpipe.core.graph.task_graph import TaskGraph, Wiring
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.policies.share import Share
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.report import Report, report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.backward_first import BackwardFirst
from asyncpipe.core.schedules.one_f_one_b import OneFOneB
from asyncpipe.core.schedules.protocol import Action, B, F, HintedSchedule, OrderedSchedule, RuledSchedule, Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import ScheduleError


class TwoLines(RuledSchedule):
    """1F1B as a rule."""

    def priority(self, action: Action, shape: Shape) -> bool:
        return action.kind is TaskKind.FORWARD

    def admit(self, action: Action, live: int, shape: Shape) -> bool:
        return live < shape.devices - action.stage


def run(schedule: RuledSchedule | str, shape: Shape, costs: Callable[[Task], float] | None = None) -> Report:
    found = find_schedule(schedule) if isinstance(schedule, str) else schedule
    return report(simulate(lower(found, shape), costs or Costs()))


@pytest.mark.parametrize("costs", [Costs(), Costs(3, 2), Costs(1, 2, copy=1), Costs(2, 3, copy=0.5)], ids=str)
def test_1f1b_in_two_lines_is_1f1b(costs: Costs) -> None:
    for p, m in product(DEVICES, MICROBATCHES):
        shape = Shape(p, m, p)
        expected = run("1f1b", shape, costs)
        for schedule in (TwoLines(), HintedSchedule(OneFOneB())):
            found = run(schedule, shape, costs)
            assert found.seconds == expected.seconds, (p, m, schedule.name)
            assert found.peak_in_flight == expected.peak_in_flight


@pytest.mark.parametrize("cap", [None, 1, 3])
def test_backward_first_keeps_its_cap_and_the_bubble_of_1f1b(cap: int | None) -> None:
    for p, m in product(DEVICES, MICROBATCHES):
        found = run(BackwardFirst(cap), Shape(p, m, p))
        assert max(found.peak_in_flight) <= (cap or p)
        if cap is None:
            assert found.seconds == 3 * (m + p - 1), (p, m)


def test_a_hint_does_not_wait_for_what_is_late() -> None:
    """Device 1 must not stand behind micro-batch 0, whose forward is slow, when it could be at micro-batch 1's."""

    class Parallel(OrderedSchedule):
        def order(self, device: int, shape: Shape) -> Iterable[Action]:
            return [F(0, device), F(1, device), B(0, device), B(1, device)]

    def costs(task: Task) -> float:
        return 9.0 if task[1:4] in [(TaskKind.FORWARD, 0, 0), (TaskKind.FORWARD, 1, 1)] else 1.0

    strict = report(simulate(lower(Parallel(), Shape(3, 2, 3)), costs)).seconds
    hinted = report(simulate(lower(HintedSchedule(Parallel()), Shape(3, 2, 3)), costs)).seconds
    assert hinted < strict


# The graph


def test_what_belongs_to_the_whole_step_waits_for_every_backward() -> None:
    """Without a chain the last backward in a list need not be the last one to run."""
    wiring = Wiring(((0, 1), (1, 2)), ties=((0, 2),), updates=(0, 1))
    graph = lower(TwoLines(), Shape(3, 3, 3), wiring=wiring)
    before = {task.id: {graph.tasks[d].id for d in graph.dependencies[task.number]} for task in graph.tasks}
    assert before["U(1)"] == {"B(0,1)", "B(1,1)", "B(2,1)"}
    assert before["S(0)"] == {"B(0,0)", "B(1,0)", "B(2,0)", "C(2>0)"}
    assert before["C(2>0)"] == {"B(0,2)", "B(1,2)", "B(2,2)"}
    assert all("C(0>2)" in before[f"F({i},2)"] for i in range(3)), "any forward may be the first one"


# Rules that are none


class GoesBad(RuledSchedule):
    """One micro-batch a device at a time, by a rule that lowering finds well, and that changes its mind on the last."""

    splits_backward = True

    def __init__(self, answer: Callable[[], bool]) -> None:
        self._answer = answer

    def lowered(self, shape: Shape) -> TaskGraph:
        self._is_bad = False
        graph = lower(self, shape)
        self._is_bad = True
        return graph

    def priority(self, action: Action, shape: Shape) -> int:
        return 0

    def admit(self, action: Action, live: int, shape: Shape) -> bool:
        if self._is_bad and action.microbatch == shape.microbatches - 1 and not action.stage and not live:
            return self._answer()
        return live < 1


def raises() -> bool:
    raise OSError("gone")


def refuses() -> bool:
    return False


@pytest.mark.parametrize("jobs", [("a", "a", "a"), ("a", "b", "b")], ids=["one job", "several jobs"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_rule_that_goes_bad_on_an_empty_device_fails_its_step_alone(microbatches: int, jobs: tuple[str, ...]) -> None:
    """Nothing else of the step is ready or runs when the rule is asked; the other steps have theirs."""
    raising, refusing = (GoesBad(answer).lowered(Shape(1, microbatches, 1)) for answer in (raises, refuses))
    scheduler = ByHand()
    commands: list[Command] = []
    ends: dict[int, StepCompleted] = {}
    for number, graph in enumerate([raising, refusing, lower(find_schedule("gpipe"), Shape(1, 4, 1))]):
        commands += scheduler.send(StepSubmitted(number, graph, Share(jobs[number])), 0.0)
    while commands:
        command = commands.pop(0)
        if isinstance(command, Dispatch):
            commands += scheduler.send(TaskCompleted(command.step, command.task, 0.0, 0.0), 0.0)
        elif isinstance(command, StepCompleted):
            ends[command.step] = command
    assert [ends[step].outcome for step in range(3)] == [Outcome.FAILED, Outcome.FAILED, Outcome.OK]
    last = raising.find(TaskKind.FORWARD, microbatches - 1, 0).number
    assert (ends[0].failed_task, ends[1].failed_task) == (last, last)
    assert "but raises OSError('gone')" in str(ends[0].error)
    assert "although the device holds no micro-batch" in str(ends[1].error)


def test_a_rule_that_refuses_an_empty_device_fails_its_step_while_another_device_works() -> None:
    """Device 0 is empty and refuses F(1,0), while W(0,1), which nothing waits for, still runs."""
    graph = GoesBad(refuses).lowered(Shape(2, 2, 2))
    late = (TaskKind.WEIGHT_GRADIENT, 1)
    with pytest.raises(ScheduleError, match=r"admit does not let F\(1,0\) in, although the device holds no"):
        simulate(graph, lambda task: 9.0 if (task.kind, task.stage) == late else 1.0)


def test_a_part_that_waits_for_others_is_not_stuck_and_one_whose_empty_device_is_refused_is() -> None:
    """The rule of device 0 refuses F(1,0); device 1, of another worker, has yet to send the gradient of F(1,0)."""
    mine = part(GoesBad(refuses).lowered(Shape(2, 2, 2)), ["dev:0"]).graph
    scheduler = ByHand()
    first = mine.find(TaskKind.FORWARD, 0, 0).number
    assert scheduler.send(StepSubmitted(0, mine), 0.0) == [Dispatch(0, first)]
    assert scheduler.send(TaskCompleted(0, first, 0.0, 1.0), 1.0) == [], "it waits for the other part"
    gate = mine.gates.index(mine.find(TaskKind.COPY, 0, 0, 1).number)
    commands = scheduler.send(GateOpened(0, gate), 2.0)
    while any(isinstance(command, Dispatch) for command in commands):
        command = next(command for command in commands if isinstance(command, Dispatch))
        commands = scheduler.send(TaskCompleted(0, command.task, 2.0, 3.0), 3.0)
    assert [type(command) for command in commands] == [Abort, StepFinished, StepCompleted]
    assert isinstance(commands[-1], StepCompleted)
    assert commands[-1].failed_task is not None
    assert mine.tasks[commands[-1].failed_task].id == "F(1,0)"
    assert "although the device holds no micro-batch" in str(commands[-1].error)


def most_held(times: Report, graph: TaskGraph) -> list[int]:
    """The most micro-batches of each device between the start of their first and the end of their last task there."""
    most = []
    for device in graph.devices:
        mine = [t for t in times.tasks if t.task.lane.device == device and t.task.lane.queue is Queue.COMPUTE]
        spans: dict[int, tuple[float, float]] = {}
        for time in mine:
            if time.task.microbatch != WHOLE_STEP:
                start, end = spans.get(time.task.microbatch, (time.start, time.end))
                spans[time.task.microbatch] = min(start, time.start), max(end, time.end)
        changes = sorted([(start, 1) for start, _ in spans.values()] + [(end, -1) for _, end in spans.values()])
        live = peak = 0
        for _, change in changes:
            live += change
            peak = max(peak, live)
        most.append(peak)
    return most


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_no_rule_gets_stuck_or_breaks_its_cap(draw: random.Random) -> None:
    graph, caps = random_ruled_graph(draw)
    costs = {task.number: draw.choice([0.25, 1.0, draw.random() + 0.01, 5.0]) for task in graph.tasks}
    times = report(simulate(graph, lambda task: costs[task.number]))
    ends = {time.task.number: time.end for time in times.tasks}
    assert sorted(ends) == list(range(len(graph.tasks))), "everything ran"
    for time in times.tasks:
        assert all(ends[before] <= time.start for before in graph.dependencies[time.task.number])
    assert all(held <= cap for held, cap in zip(most_held(times, graph), caps, strict=True))
