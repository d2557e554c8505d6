"""Eager 1F1B and looped breadth-first: complete, free of deadlock, with their closed forms, and what slack is worth."""

from __future__ import annotations

from itertools import product

import pytest
from shapes import DEVICES, MICROBATCHES

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.report import Report, report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.interleaved import LoopedBreadthFirst
from asyncpipe.core.schedules.one_f_one_b import EagerOneFOneB
from asyncpipe.core.schedules.protocol import Schedule, Shape

COSTS = (Costs(1), Costs(3, 2))
HALVES = Costs(1, input_gradient=1, weight_gradient=1)


def name_of(costs: Costs) -> str:
    return f"F{costs.forward}-B{costs.full_backward}"


def run(schedule: Schedule, p: int, m: int, v: int = 1, costs: Costs = HALVES) -> Report:
    graph = lower(schedule, Shape(p * v, m, p))
    actions = sorted(task[1:4] for task in graph.tasks if task.kind is not TaskKind.COPY)
    everything = product((TaskKind.FORWARD, TaskKind.BACKWARD), range(m), range(p * v))
    assert actions == sorted(everything), "each forward and each backward is there once"
    return report(simulate(graph, costs))


@pytest.mark.parametrize("costs", COSTS, ids=name_of)
def test_eager_1f1b_has_the_makespan_of_1f1b_and_its_own_peaks(costs: Costs) -> None:
    for p, m in product(DEVICES, MICROBATCHES):
        times = run(EagerOneFOneB(), p, m, costs=costs)
        stage = costs.forward + costs.full_backward
        assert times.seconds == (m + p - 1) * stage, (p, m)
        assert times.bubble_ratio == pytest.approx((p - 1) / (m + p - 1)), (p, m)
        assert times.peak_in_flight == tuple(min(m, 2 * (p - r) - 1) for r in range(p)), (p, m)


def test_a_cap_is_kept() -> None:
    for p, m, cap in product(DEVICES, (1, 5, 16), range(1, 16)):
        times = run(EagerOneFOneB(cap), p, m)
        assert times.peak_in_flight[0] == min(m, cap, 2 * p - 1), (p, m, cap)
        assert list(times.peak_in_flight) == sorted(times.peak_in_flight, reverse=True), (p, m, cap)
        if cap >= min(p, m):
            assert times.seconds == (m + p - 1) * 3, "it costs nothing"
        else:
            assert (m + p - 1) * 3 < times.seconds <= m * p * 3, (p, m, cap)


def test_slack_grows_with_the_cap() -> None:
    costs = Costs(1, 2, copy=1)
    seconds = [run(EagerOneFOneB(cap), 4, 16, costs=costs).seconds for cap in range(1, 9)]
    assert seconds == [288, 152, 132, 85, 78, 71, 63, 63]


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p", DEVICES)
def test_breadth_first_divides_the_bubble(p: int, v: int) -> None:
    """Bubble (p-1)(t_F + t_B)/v from m = p on; below, a device waits for the round trip of p stages, v - 1 times."""
    for m, costs in product(MICROBATCHES, COSTS):
        times = run(LoopedBreadthFirst(), p, m, v, costs)
        waits = max(0, p - m) * (v - 1)
        stage = costs.forward + costs.full_backward
        assert times.seconds == (m * v + p - 1 + waits) * stage, (m, costs)
        assert times.bubble_ratio == pytest.approx(1 - m * v * stage / times.seconds), (m, costs)
        assert times.peak_in_flight == (m,) * (p * v), "every stage holds every micro-batch"
