"""Steps that overlap: how soon one follows the other, by hand, by bounds, and as the documentation says."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import Queue
from asyncpipe.core.graph.task_graph import TaskGraph, Wiring
from asyncpipe.core.predict.costs import Costs, Jitter
from asyncpipe.core.predict.report import report, reports, steady_state
from asyncpipe.core.predict.simulate import can_overlap, simulate, simulate_steps
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError

SCHEDULES = (Path(__file__).parents[3] / "docs" / "schedules.md").read_text(encoding="utf-8")
STEADY = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| ([\d.]+) % \| ([\d.]+) \| ([\d.]+) % \|$", SCHEDULES, re.MULTILINE)
NAMES = ["gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-h2", "zbv"]


def graph_of(name: str, devices: int, microbatches: int, *, updates: bool = False) -> TaskGraph:
    schedule = find_schedule(name)
    stages = devices * (schedule.virtual or 1)
    wiring = Wiring(Wiring.chain(stages).links, updates=tuple(range(stages)) if updates else ())
    return lower(schedule, Shape(stages, microbatches, devices), wiring=wiring)


def test_steps_of_a_rule_and_steps_with_tied_parameters_do_not_overlap() -> None:
    tied = lower(find_schedule("zb-h2"), Shape(3, 5, 3), wiring=Wiring(((0, 1), (1, 2)), ((0, 2),), (0, 1, 2)))
    for graph in (graph_of("backward-first", 3, 4), tied):
        assert not can_overlap(graph)
        assert steady_state(reports(simulate_steps(graph, steps=3))).seconds == report(simulate(graph)).seconds
    # The second step must not copy the tied parameters before their owner has updated them.
    first, second = reports(simulate_steps(tied, steps=2))
    copied = next(time.start for time in second.tasks if time.task.id == "C(0>2)")
    assert copied >= next(time.end for time in first.tasks if time.task.id == "U(0)") > 0


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.3, 3.0]),
    st.sampled_from([0.0, 0.4]),
    st.integers(0, 99),
    st.integers(1, 3),
    st.booleans(),
)
def test_steady_state_lies_between_the_busiest_device_and_a_single_step(
    name: str, p: int, m: int, copy: float, sigma: float, seed: int, ahead: int, updates: bool
) -> None:
    graph, cost = graph_of(name, p, m, updates=updates), Jitter(Costs(copy=copy), sigma, seed)
    records = simulate_steps(graph, cost, steps=5, ahead=ahead)
    single, found = report(simulate(graph, cost)), steady_state(reports(records))
    assert max(single.device_busy.values()) - 1e-9 <= found.seconds <= single.seconds + 1e-9
    assert -1e-9 <= found.bubble_ratio <= single.bubble_ratio + 1e-9
    ends = [step.end for step in reports(records)]
    assert [later - end for end, later in pairwise(ends)] == pytest.approx([found.seconds] * 4), "even from the start"
    for earlier, later in pairwise(reports(records)):
        for device in graph.devices:
            last = max(t.end for t in earlier.tasks if t.task.lane.device == device and is_compute(t.task.lane.queue))
            begin = min(t.start for t in later.tasks if t.task.lane.device == device and is_compute(t.task.lane.queue))
            assert begin >= last - 1e-9


def is_compute(queue: Queue) -> bool:
    return queue is Queue.COMPUTE


def test_what_shows_no_steady_state_is_refused() -> None:
    with pytest.raises(OptionError, match="two steps or more, got 1"):
        steady_state([report(simulate(graph_of("1f1b", 2, 2)))])
    with pytest.raises(OptionError, match="ahead must be a number of steps, zero or more, got -1"):
        simulate_steps(graph_of("1f1b", 2, 2), steps=2, ahead=-1)


def test_the_documentation_has_the_ordered_schedules() -> None:
    assert [row[0] for row in STEADY] == [
        *("gpipe", "1f1b", "eager-1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "interleaved-zb"),
        *("zbv", "v-half", "v-min", "dualpipev", "hanayo"),
    ]


@pytest.mark.parametrize("row", STEADY, ids=lambda row: row[0])
def test_the_documented_bubbles_are_those_of_the_simulator(row: tuple[str, ...]) -> None:
    graph = graph_of(row[0], 4, 8)
    share = 4 / graph.shape.stages
    costs = Costs(share, None, share, 0.0, share, share)
    single, found = report(simulate(graph, costs)), steady_state(reports(simulate_steps(graph, costs, steps=4)))
    figures = single.seconds, single.bubble_ratio * 100, found.seconds, abs(found.bubble_ratio) * 100
    assert [f"{figure:.3g}" if number % 2 == 0 else f"{figure:.1f}" for number, figure in enumerate(figures)] == [
        *row[1:]
    ]
