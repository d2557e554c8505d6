"""Zero bubble schedules: complete, free of deadlock, with the bubbles and peaks that their docstrings claim."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from shapes import DEVICES, MICROBATCHES, held

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import Queue
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.report import Report, TaskTime, report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.interleaved import Interleaved
from asyncpipe.core.schedules.protocol import Schedule, Shape
from asyncpipe.core.schedules.zero_bubble import ZBH1, ZBH2, InterleavedZeroBubble

FORWARD, INPUTS, WEIGHTS = TaskKind.FORWARD, TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT


def times_of(forward: float, inputs: float, weights: float) -> Costs:
    return Costs(forward, input_gradient=inputs, weight_gradient=weights)


def name_of(costs: Costs) -> str:
    return f"F{costs.forward}-I{costs.input_gradient}-W{costs.weight_gradient}"


EQUAL = times_of(1, 1, 1)
CLOSED = (times_of(2, 2, 1), times_of(1, 2, 1), times_of(4, 5, 3), times_of(3, 2, 2), times_of(1, 5, 1))
"""A W that is no longer than F and I: what the papers' closed forms need."""
OTHERS = (times_of(1, 2, 2), times_of(1, 1, 2), times_of(3, 1, 2), times_of(1, 3, 2), times_of(2, 5, 6))


def run(schedule: Schedule, p: int, m: int, v: int = 1, costs: Costs = EQUAL) -> Report:
    graph = lower(schedule, Shape(p * v, m, p))
    actions = sorted(task[1:4] for task in graph.tasks if task.kind is not TaskKind.COPY)
    assert actions == sorted(product((FORWARD, INPUTS, WEIGHTS), range(m), range(p * v))), (
        "each F, I and W is there once"
    )
    return report(simulate(graph, costs))


def work(costs: Costs) -> float:
    return costs.forward + costs.input_gradient + costs.weight_gradient


def computed(times: Report) -> Iterator[list[TaskTime]]:
    """What each device computed, by start."""
    for device in times.device_busy:
        lane = [time for time in times.tasks if time.task.lane.device == device]
        yield [time for time in lane if time.task.lane.queue is Queue.COMPUTE]


def idle_inside(times: Report) -> float:
    """The longest that a device is idle between its own first and last action: how the paper counts a bubble."""
    return max(tasks[-1].end - tasks[0].start - sum(time.seconds for time in tasks) for tasks in computed(times))


def papers(p: int, m: int, most: int, costs: Costs) -> float:
    """(p-1)(t_F + t_I - k t_W) where m is at least ``most`` = k(p-1) + 1; below, a W less for each missing one."""
    return (p - 1) * (costs.forward + costs.input_gradient) - (min(m, most) - 1) * costs.weight_gradient


@pytest.mark.parametrize("costs", [EQUAL, *CLOSED], ids=name_of)
def test_zb_h1_has_its_closed_form(costs: Costs) -> None:
    for p, m in product(DEVICES, MICROBATCHES):
        times = run(ZBH1(), p, m, costs=costs)
        bubble = papers(p, m, p, costs)
        assert times.seconds == m * work(costs) + bubble, (p, m)
        assert times.bubble_ratio == pytest.approx(bubble / times.seconds), (p, m)
        assert idle_inside(times) == bubble, (p, m)
        if m >= p:
            assert bubble == (p - 1) * (costs.forward + costs.input_gradient - costs.weight_gradient)


@pytest.mark.parametrize("costs", [EQUAL, *CLOSED], ids=name_of)
def test_zb_h2_has_its_closed_form_inside_a_device_and_the_last_ones_delay_outside(costs: Costs) -> None:
    for p, m in product(DEVICES, MICROBATCHES):
        times = run(ZBH2(), p, m, costs=costs)
        inside = max(0, papers(p, m, 2 * p - 1, costs))
        assert idle_inside(times) == inside, (p, m)
        bubble = max((p - 1) * costs.forward, inside)
        assert times.seconds == m * work(costs) + bubble, (p, m)
        assert times.bubble_ratio == pytest.approx(bubble / times.seconds), (p, m)
        assert times.seconds <= run(ZBH1(), p, m, costs=costs).seconds, (p, m)


@pytest.mark.parametrize("costs", [EQUAL, *CLOSED, *OTHERS], ids=name_of)
def test_what_holds_at_any_times(costs: Costs) -> None:
    """The largest of the three terms in the module's docstring, with enough micro-batches."""
    f, i, w = costs.forward, costs.input_gradient, costs.weight_gradient
    for p in DEVICES:
        one, two = (p - 1) * max(f, i, f + i - w), (p - 1) * max(f, i - f, f + i - 2 * w)
        for m in (p, p + 1, 2 * p, 16):
            assert run(ZBH1(), p, m, costs=costs).seconds == m * work(costs) + one, (p, m)
        for m in (2 * p - 1, 2 * p, 20):
            assert run(ZBH2(), p, m, costs=costs).seconds == m * work(costs) + two, (p, m)
        for v, m in product((2, 3), (p, 2 * p)):
            times = run(InterleavedZeroBubble(), p, m, v, costs)
            assert times.seconds == m * v * work(costs) + one, (p, m, v)


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p", DEVICES)
def test_interleaved_zb(p: int, v: int) -> None:
    """Bubble (p-1)(t_F + t_I - t_W)/v and p micro-batches where p divides m; elsewhere between that and two others."""
    for m in MICROBATCHES:
        times = run(InterleavedZeroBubble(), p, m, v)
        ideal = m * v * work(EQUAL) + p - 1
        if m % p == 0:
            assert times.seconds == ideal, m
            assert times.bubble_ratio == pytest.approx((p - 1) / ideal), m
            assert held(times, [WEIGHTS]) == [p * v] * p, m
            assert held(times, [INPUTS]) == [p * v - r for r in range(p)], m
        else:
            padded = (m + -m % p) * v * work(EQUAL) + p - 1
            plain = report(simulate(lower(Interleaved(), Shape(p * v, m, p)), EQUAL))
            assert ideal <= times.seconds <= min(padded, plain.seconds), m
            assert max(held(times, [WEIGHTS])) == min(m, p) * v, m
