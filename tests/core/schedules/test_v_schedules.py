"""Schedules on a V or a zigzag: complete, free of deadlock, and as fast and as sparing as their docstrings say."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
from shapes import ALL, DEVICES, MICROBATCHES, held

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.report import Report, report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.dualpipev import DualPipeV
from asyncpipe.core.schedules.hanayo import Hanayo
from asyncpipe.core.schedules.protocol import OrderedSchedule, Shape
from asyncpipe.core.schedules.v_shaped import VHalf, VMin, ZeroBubbleV
from asyncpipe.errors import ScheduleError

F, B, I, W = (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT)  # noqa: E741


def run(schedule: OrderedSchedule, p: int, m: int, costs: Costs | None = None, v: int = 2) -> Report:
    return report(simulate(lower(schedule, Shape(v * p, m, p)), costs or Costs()))


def bubble(times: Report, v: int, m: int, costs: Costs | None = None) -> float:
    """What the step takes beyond the work of one device, which has ``v`` stages."""
    costs = costs or Costs()
    return times.seconds - v * m * (costs.forward + costs.full_backward)


def peaks(times: Report, v: int, ends: Collection[TaskKind] = (B, W)) -> list[float]:
    """As ``held``, counted 1/v at each of a device's ``v`` stages."""
    return [most / v for most in held(times, ends)]


# The V family.


@pytest.mark.parametrize("p", DEVICES)
def test_zero_bubble_v_has_its_closed_form_for_every_shape(p: int) -> None:
    for m in MICROBATCHES:
        times = run(ZeroBubbleV(), p, m)
        assert bubble(times, 2, m) == max(p - 1, 4 * p - 2 - 2 * m), m
        assert max(peaks(times, 2)) == min(m, p), m
        assert max(peaks(times, 2, (I,))) == min(m, p), m


def v_half_bubble(p: int) -> int:
    if p <= 2:
        return p - 1
    return 3 * p - 4 if p % 2 else 3 * p - 7 if p <= 12 else 3 * p - 5


def v_min_bubble(p: int) -> int:
    return max(0, 4 * p - 5 if p % 3 == 1 else 4 * p - 7)


@pytest.mark.parametrize(
    ("schedule", "closed", "parts"), [(VHalf(), v_half_bubble, 2), (VMin(), v_min_bubble, 3)], ids=["v-half", "v-min"]
)
@pytest.mark.parametrize("p", DEVICES)
def test_v_half_and_v_min_have_a_part_of_the_memory_and_less_bubble(
    schedule: OrderedSchedule, closed: Callable[[int], int], parts: int, p: int
) -> None:
    """Half of each, or a third of the memory and two thirds of the bubble."""
    for m in MICROBATCHES:
        times = run(schedule, p, m)
        if m >= p:
            assert bubble(times, 2, m) == closed(p) <= 6 * (p - 1) * (1 / 2 if parts == 2 else 2 / 3), m
        else:
            assert bubble(times, 2, m) <= 4 * p - 5, m
        most = min(m, (p + 2) // 2 if parts == 2 else (p + 4) // 3)
        assert max(peaks(times, 2)) == max(peaks(times, 2, (I,))) == most, m


# DualPipeV.


@pytest.mark.parametrize("p", DEVICES)
def test_dualpipev_has_its_closed_form_for_every_shape(p: int) -> None:
    for m in range(2 * p, 2 * p + 17, 1 if ALL else 4):
        times = run(DualPipeV(), p, m)
        assert bubble(times, 2, m) == p - 1, m
        assert peaks(times, 2) == [p + 1 / 2] * p, m


@pytest.mark.parametrize("m", [1, 7])
def test_dualpipev_asks_for_as_many_microbatches_as_stages(m: int) -> None:
    message = rf"'dualpipev' needs at least as many micro-batches as stages, got {m} .* 8 stages; give at least 8"
    with pytest.raises(ScheduleError, match=message):
        lower(DualPipeV(), Shape(8, m, 4))


# Hanayo.


@pytest.mark.parametrize("waves", [1, 2, 3])
@pytest.mark.parametrize("p", DEVICES)
def test_hanayo_has_its_closed_form_where_p_divides_m(p: int, waves: int) -> None:
    costs = Costs(1, 2)
    v = 2 * waves
    for m in (*MICROBATCHES, 24) if p == 8 else MICROBATCHES:
        times = run(Hanayo(), p, m, costs, v)
        idle = bubble(times, v, m, costs)
        most = max(peaks(times, v))
        if m % p == 0:
            assert idle == 4 * (p - 1), m
            assert most == (p if m == p else p + (p - 1) / v), m
        else:
            assert idle <= min(6 * waves * (p - 1), 4 * (p - 1) + -m % p * 3 * (v - 1)), m
            assert most <= min(m, p + (p - 1) / v), m
