"""Random rules, hints, stage graphs and costs: never a deadlock that lowering did not tell, never above the cap."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_ruled_graph

from asyncpipe.core.graph.task import WHOLE_STEP, Queue
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.predict.report import Report, report
from asyncpipe.core.predict.simulate import simulate


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
