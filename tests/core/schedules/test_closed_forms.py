"""The built-in schedules have the makespans, bubbles and peaks that their docstrings claim."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import product

import pytest
from shapes import ALL, DEVICES, MICROBATCHES, held

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import Queue
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.report import Report, TaskTime, report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.dualpipev import DualPipeV
from asyncpipe.core.schedules.hanayo import Hanayo
from asyncpipe.core.schedules.interleaved import Interleaved, LoopedBreadthFirst
from asyncpipe.core.schedules.one_f_one_b import EagerOneFOneB
from asyncpipe.core.schedules.protocol import OrderedSchedule, Schedule, Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.core.schedules.v_shaped import VHalf, VMin, ZeroBubbleV
from asyncpipe.core.schedules.zero_bubble import ZBH1, ZBH2, InterleavedZeroBubble
from asyncpipe.errors import ScheduleError

INPUTS, WEIGHTS = TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT


def times_of(forward: float, inputs: float, weights: float) -> Costs:
    return Costs(forward, input_gradient=inputs, weight_gradient=weights)


def name_of(costs: Costs) -> str:
    return f"F{costs.forward}-B{costs.backward}-I{costs.input_gradient}-W{costs.weight_gradient}"


EQUAL = times_of(1, 1, 1)
CLOSED = (times_of(2, 2, 1), times_of(1, 2, 1), times_of(4, 5, 3), times_of(3, 2, 2), times_of(1, 5, 1))
"""A W that is no longer than F and I: what the papers' closed forms need."""
OTHERS = (times_of(1, 2, 2), times_of(1, 1, 2), times_of(3, 1, 2), times_of(1, 3, 2), times_of(2, 5, 6))


def run(schedule: Schedule, p: int, m: int, v: int = 1, costs: Costs = EQUAL) -> Report:
    """``lower`` refuses a schedule that forgets or repeats an action, and one that deadlocks."""
    return report(simulate(lower(schedule, Shape(p * v, m, p)), costs))


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
            plain = run(Interleaved(), p, m, v)
            assert ideal <= times.seconds <= min(padded, plain.seconds), m
            assert max(held(times, [WEIGHTS])) == min(m, p) * v, m


# GPipe, 1F1B and interleaved.


@pytest.mark.parametrize("costs", [Costs(1, 2), Costs(3, 2)], ids=name_of)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_makespan_and_peaks_have_their_closed_forms(name: str, costs: Costs) -> None:
    for p, m in product(DEVICES, MICROBATCHES):
        times = run(find_schedule(name), p, m, costs=costs)
        assert times.seconds == (m + p - 1) * (costs.forward + costs.full_backward), (p, m)
        expected = tuple(m if name == "gpipe" else min(m, p - stage) for stage in range(p))
        assert times.peak_in_flight == expected, (p, m)


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p", DEVICES)
def test_interleaving_divides_the_bubble(p: int, v: int) -> None:
    """Bubble (p-1)(t_F + t_B)/v where p divides m, with t_F and t_B of all v virtual stages of a device.

    For other m, each of the micro-batches missing from the last round costs at most (v-1)/v of its
    t_F + t_B more, and less than that where there are more rounds to make up for it.
    """
    costs = Costs(1, 2)
    stage = costs.forward + costs.full_backward
    for m in MICROBATCHES:
        times = run(Interleaved(), p, m, v, costs)
        ideal = (m * v + p - 1) * stage
        missing = -m % p
        assert ideal <= times.seconds <= ideal + missing * (v - 1) * stage, m
        if m < p:
            assert times.seconds == ideal + missing * (v - 1) * stage, "the bound is tight where there is one round"
        if missing == 0 and m >= 2 * p:
            assert held(times, [TaskKind.BACKWARD])[0] / v == p + (p - 1) / v, m
        else:
            assert held(times, [TaskKind.BACKWARD])[0] <= p * v + p - 1, m


# Eager 1F1B and looped breadth-first.

COSTS = (Costs(1), Costs(3, 2))


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


def bubble(times: Report, v: int, m: int, costs: Costs | None = None) -> float:
    """What the step takes beyond the work of one device, which has ``v`` stages."""
    costs = costs or Costs()
    return times.seconds - v * m * (costs.forward + costs.full_backward)


def peaks(times: Report, v: int, ends: Collection[TaskKind] = (TaskKind.BACKWARD, WEIGHTS)) -> list[float]:
    """As ``held``, counted 1/v at each of a device's ``v`` stages."""
    return [most / v for most in held(times, ends)]


# The V family.


@pytest.mark.parametrize("p", DEVICES)
def test_zero_bubble_v_has_its_closed_form_for_every_shape(p: int) -> None:
    for m in MICROBATCHES:
        times = run(ZeroBubbleV(), p, m, 2)
        assert bubble(times, 2, m) == max(p - 1, 4 * p - 2 - 2 * m), m
        assert max(peaks(times, 2)) == min(m, p), m
        assert max(peaks(times, 2, (INPUTS,))) == min(m, p), m


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
        times = run(schedule, p, m, 2)
        if m >= p:
            assert bubble(times, 2, m) == closed(p) <= 6 * (p - 1) * (1 / 2 if parts == 2 else 2 / 3), m
        else:
            assert bubble(times, 2, m) <= 4 * p - 5, m
        most = min(m, (p + 2) // 2 if parts == 2 else (p + 4) // 3)
        assert max(peaks(times, 2)) == max(peaks(times, 2, (INPUTS,))) == most, m


# DualPipeV.


@pytest.mark.parametrize("p", DEVICES)
def test_dualpipev_has_its_closed_form_for_every_shape(p: int) -> None:
    for m in range(2 * p, 2 * p + 17, 1 if ALL else 4):
        times = run(DualPipeV(), p, m, 2)
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
        times = run(Hanayo(), p, m, v, costs)
        idle = bubble(times, v, m, costs)
        most = max(peaks(times, v))
        if m % p == 0:
            assert idle == 4 * (p - 1), m
            assert most == (p if m == p else p + (p - 1) / v), m
        else:
            assert idle <= min(6 * waves * (p - 1), 4 * (p - 1) + -m % p * 3 * (v - 1)), m
            assert most <= min(m, p + (p - 1) / v), m
