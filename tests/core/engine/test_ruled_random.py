"""Random rules, hints, stage graphs and costs: never a deadlock that lowering did not tell, never above the cap."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_ruled_graph

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
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import WHOLE_STEP, Queue
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.predict.report import Report, report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule


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


@settings(max_examples=100)
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


@settings(max_examples=100)
@given(st.randoms(use_true_random=False))
def test_several_steps_share_lanes_in_any_order_of_events(draw: random.Random) -> None:
    """Ruled and ordered steps together; devices report in any order, late or in two parts; some are cancelled, or have
    a rule that is none.
    """
    state = SchedulerState(in_flight=draw.choice([1, 2, 16]))
    graphs = [
        random_ruled_graph(draw, draw.choice([0.0, 0.1]))[0]
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
