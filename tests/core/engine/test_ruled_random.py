"""Random rules, hints, stage graphs and costs: never a deadlock that lowering did not tell, never above the cap."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.core.engine.events import (
    Command,
    Dispatch,
    Outcome,
    StepCancelled,
    StepCompleted,
    StepFinished,
    StepSubmitted,
    TaskCompleted,
    TaskDropped,
    TaskIssued,
)
from asyncpipe.core.engine.scheduler import SchedulerState
from asyncpipe.core.graph.lower import CheckpointMode, lower
from asyncpipe.core.graph.task import WHOLE_STEP, Queue
from asyncpipe.core.graph.task_graph import TaskGraph, Wiring
from asyncpipe.core.predict.report import Report, report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.protocol import Action, B, F, HintedSchedule, I, OrderedSchedule, RuledSchedule, Shape, W
from asyncpipe.core.schedules.registry import find_schedule


class Random(RuledSchedule):
    """Any placement, any priorities, any cap of at least 1 for what comes in at each stage."""

    def __init__(self, shape: Shape, draw: random.Random) -> None:
        self.splits_backward = draw.random() < 0.5
        self.ahead = draw.choice([1, 1, 2, 3])
        self._caps = [draw.randint(1, 4) for _ in range(shape.stages)]
        self._placement = [draw.randrange(shape.devices) for _ in range(shape.stages)]
        self._draw = draw
        self.mood = 0.0
        """How often the rule refuses or raises for no reason."""
        mine = [[c for c, at in zip(self._caps, self._placement, strict=True) if at == d] for d in range(shape.devices)]
        self.caps = [max(caps, default=0) for caps in mine]

    def placement(self, shape: Shape) -> Sequence[int]:
        return self._placement

    def check(self, shape: Shape) -> None:
        pass

    def priority(self, action: Action, shape: Shape) -> float:
        return self._draw.choice([0.0, self._draw.random()])

    def admit(self, action: Action, live: int, shape: Shape) -> bool:
        if self._draw.random() < self.mood:
            if self._draw.random() < 0.5:
                raise OSError("gone")
            return False
        return live < self._caps[action.stage]


class RandomOrder(OrderedSchedule):
    """A random run of the whole step, cut up by device."""

    def __init__(self, shape: Shape, draw: random.Random) -> None:
        self._placement = [draw.randrange(shape.devices) for _ in range(shape.stages)]
        self._orders: list[list[Action]] = [[] for _ in range(shape.devices)]
        ways = []
        for i in range(shape.microbatches):
            way = [F(i, j) for j in range(shape.stages)]
            for j in reversed(range(shape.stages)):
                way += [I(i, j), W(i, j)] if draw.random() < 0.5 else [B(i, j)]
            ways.append(way)
        while ways := [way for way in ways if way]:
            action = draw.choice(ways).pop(0)
            self._orders[self._placement[action.stage]].append(action)

    def order(self, device: int, shape: Shape) -> Iterable[Action]:
        return self._orders[device]

    def placement(self, shape: Shape) -> Sequence[int]:
        return self._placement

    def check(self, shape: Shape) -> None:
        pass


def random_wiring(stages: int, draw: random.Random) -> Wiring:
    """Any links from earlier to later stages; some stages may not be joined at all."""
    links = [(a, b) for a in range(stages) for b in range(a + 1, stages) if draw.random() < 0.4]
    ties = [(a, b) for a in range(stages) for b in range(a + 1, stages) if draw.random() < 0.1]
    return Wiring(tuple(links), tuple(ties), tuple(j for j in range(stages) if draw.random() < 0.3))


def random_graph(draw: random.Random, mood: float = 0.0) -> tuple[TaskGraph, list[int]]:
    """A ruled or hinted graph, and the cap of each device; from here on a rule has its ``mood``."""
    shape = Shape(draw.randint(1, 5), draw.randint(1, 6), draw.randint(1, 3))
    schedule: RuledSchedule
    if draw.random() < 0.5:
        schedule = Random(shape, draw)
        caps = schedule.caps
    else:
        cap = draw.choice([None, 1, 2])
        order = RandomOrder(shape, draw)
        schedule = HintedSchedule(order, cap)
        caps = [cap or shape.microbatches] * shape.devices
    wiring = random_wiring(shape.stages, draw)
    placement = schedule.placement(shape)
    # A parameter is tied where its users are on several devices.
    ties = tuple((a, b) for a, b in wiring.ties if placement[a] != placement[b])
    graph = lower(
        schedule, shape, wiring=Wiring(wiring.links, ties, wiring.updates), checkpoint=draw.choice(list(CheckpointMode))
    )
    if isinstance(schedule, Random):
        schedule.mood = mood
    return graph, caps


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


@settings(max_examples=200)
@given(st.randoms(use_true_random=False))
def test_no_rule_gets_stuck_or_breaks_its_cap(draw: random.Random) -> None:
    graph, caps = random_graph(draw)
    costs = {task.number: draw.choice([0.25, 1.0, draw.random() + 0.01, 5.0]) for task in graph.tasks}
    times = report(simulate(graph, lambda task: costs[task.number]))
    ends = {time.task.number: time.end for time in times.tasks}
    assert sorted(ends) == list(range(len(graph.tasks))), "everything ran"
    for time in times.tasks:
        assert all(ends[before] <= time.start for before in graph.dependencies[time.task.number])
    assert all(held <= cap for held, cap in zip(most_held(times, graph), caps, strict=True))


@settings(max_examples=100)
@given(st.randoms(use_true_random=False))
def test_several_steps_share_lanes_in_any_order_of_events(draw: random.Random) -> None:
    """Ruled and ordered steps together; devices report in any order, late or in two parts; some are cancelled, or have
    a rule that is none.
    """
    state = SchedulerState(in_flight=draw.choice([1, 2, 16]))
    graphs = [
        random_graph(draw, draw.choice([0.0, 0.1]))[0]
        if draw.random() < 0.7
        else lower(find_schedule("1f1b"), Shape(2, 3, 2))
        for _ in range(draw.randint(1, 3))
    ]
    running: list[tuple[int, int, bool]] = []
    aborted: set[int] = set()
    done: dict[int, Outcome] = {}

    def take(commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Dispatch):
                assert command.step not in aborted
                running.append((command.step, command.task, False))
            elif isinstance(command, StepCompleted):
                done[command.step] = command.outcome
            elif not isinstance(command, StepFinished):
                aborted.add(command.step)

    for number, graph in enumerate(graphs):
        take(state.handle(StepSubmitted(number, graph), 0.0))
    take(state.choose(0.0))
    while running:
        step, task, issued = running.pop(draw.randrange(len(running)))
        if step in aborted and not issued and draw.random() < 0.5:
            take(state.handle(TaskDropped(step, task), 1.0))
        elif not issued and draw.random() < 0.3:
            running.append((step, task, True))
            take(state.handle(TaskIssued(step, task), 1.0))
        else:
            take(state.handle(TaskCompleted(step, task, 0.0, 1.0), 1.0))
        if draw.random() < 0.01 and step not in done:
            take(state.handle(StepCancelled(step), 1.0))
        take(state.choose(1.0))
        state.check()
    assert sorted(done) == list(range(len(graphs)))
    assert all((outcome is Outcome.OK) == (step not in aborted) for step, outcome in done.items())
