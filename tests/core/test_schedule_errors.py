"""What ``lower`` refuses: every ScheduleError, and what it says."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

import pytest

from asyncpipe.core.graph import Phase
from asyncpipe.core.lower import lower
from asyncpipe.core.registry import find_schedule
from asyncpipe.core.schedule import Action, B, F, OrderedSchedule, Shape
from asyncpipe.core.task import TaskKind
from asyncpipe.errors import MicrobatchError, OptionError, ScheduleError

LEFT = [F(0, 0), F(1, 0), B(0, 0), B(1, 0)]
RIGHT = [F(0, 1), B(0, 1), F(1, 1), B(1, 1)]


class Listed(OrderedSchedule):
    """Orders and a placement written out."""

    name = "listed"

    def __init__(self, orders: Sequence[Iterable[Action]], placement: Sequence[int] = (0, 1)) -> None:
        self._orders = orders
        self._placement = placement

    def order(self, device: int, shape: Shape) -> Iterable[Action]:
        return self._orders[device]

    def placement(self, shape: Shape) -> Sequence[int]:
        return self._placement


def test_the_lists_that_the_others_break() -> None:
    assert len(lower(Listed([LEFT, RIGHT]), Shape(2, 2, 2)).tasks) == 12


WEIGHTS = Action(TaskKind.WEIGHT_GRADIENT, 0, 0)
ALLOWED = "is not an action of 2 micro-batches and 2 stages; actions are F, B, I and W with indices from 0"
DEVICE_0, DEVICE_1 = "schedule 'listed', device 0: ", "schedule 'listed', device 1: "
BROKEN = {
    "missing forward": ([LEFT[:3], RIGHT], DEVICE_0 + "B(1,0) is missing"),
    "missing backward": ([LEFT, RIGHT[:3]], DEVICE_1 + "B(1,1) is missing"),
    "nothing": ([LEFT, []], DEVICE_1 + "F(0,1) is missing"),
    "duplicate": ([[*LEFT, F(0, 0)], RIGHT], DEVICE_0 + "F(0,0) is there twice; each action must be there once"),
    "foreign micro-batch": ([[*LEFT, F(2, 0)], RIGHT], DEVICE_0 + "F(2,0) " + ALLOWED),
    "negative micro-batch": ([[F(-1, 0), *LEFT], RIGHT], DEVICE_0 + "F(-1,0) " + ALLOWED),
    "foreign stage": ([[*LEFT, B(0, 2)], RIGHT], DEVICE_0 + "B(0,2) " + ALLOWED),
    "negative stage": ([[*LEFT, B(0, -1)], RIGHT], DEVICE_0 + "B(0,-1) " + ALLOWED),
    "foreign kind": ([[*LEFT, WEIGHTS], RIGHT], DEVICE_0 + "W(0,0) " + ALLOWED),
    "wrong device": ([LEFT, [F(0, 0), *RIGHT]], DEVICE_1 + "F(0,0) belongs to device 0, where stage 0 is placed"),
    "backward first": (
        [LEFT, [B(0, 1), F(0, 1), *RIGHT[2:]]],
        DEVICE_1 + "B(0,1) comes before F(0,1) and would wait for ever",
    ),
}


@pytest.mark.parametrize(("orders", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_lists_that_are_no_schedule(orders: list[list[Action]], message: str) -> None:
    with pytest.raises(ScheduleError) as raised:
        lower(Listed(orders), Shape(2, 2, 2))
    assert str(raised.value) == message


def test_a_deadlock_across_devices_is_told_as_a_ring() -> None:
    """Device 0 wants B(0,0) before F(1,0); device 1 wants F(1,1) before B(0,1): each waits for the other."""
    left = [F(0, 0), B(0, 0), F(1, 0), B(1, 0)]
    right = [F(0, 1), F(1, 1), B(1, 1), B(0, 1)]
    with pytest.raises(ScheduleError) as raised:
        lower(Listed([left, right]), Shape(2, 2, 2))
    message = str(raised.value)
    head = re.match(r"schedule 'listed' deadlocks: on device (\d), (.*)", message)
    assert head is not None, message
    ring = head[2].split(", which waits for ")
    assert ring[0] == ring[-1]
    assert set(ring) == {"B(0,0)", "B(0,1)", "B(1,1)", "F(1,1)", "F(1,0)"}
    assert ring[0].endswith(f",{head[1]})"), "the device is that of the first action"
    after = {"B(0,0)": "B(0,1)", "B(0,1)": "B(1,1)", "B(1,1)": "F(1,1)", "F(1,1)": "F(1,0)", "F(1,0)": "B(0,0)"}
    assert all(after[task] == dependency for task, dependency in itertools.pairwise(ring))


def test_a_deadlock_of_forwards_alone_is_found_too() -> None:
    orders = [[F(0, 1), F(0, 0), B(0, 1), B(0, 0)]]
    schedule = Listed(orders, [0, 0])
    schedule.check = lambda shape: None  # type: ignore[method-assign]
    with pytest.raises(ScheduleError, match=r"deadlocks: on device 0, F\(0,1\), which waits for F\(0,0\)"):
        lower(schedule, Shape(2, 1, 1), phase=Phase.FORWARD)


@pytest.mark.parametrize("placement", [[0], [0, 1, 0], [0, 2], [-1, 0]])
def test_a_bad_placement(placement: list[int]) -> None:
    with pytest.raises(ScheduleError) as raised:
        lower(Listed([LEFT, RIGHT], placement), Shape(2, 2, 2))
    expected = f"schedule 'listed' places 2 stages on devices {placement}; give one device index below 2 for each stage"
    assert str(raised.value) == expected


@pytest.mark.parametrize("names", [[], ["a"], ["a", "b", "c"], ["a", "a"], ["a", "b", "b"]])
def test_as_many_different_device_names_as_devices(names: list[str]) -> None:
    with pytest.raises(ScheduleError, match="expected 2 different ones"):
        lower(Listed([LEFT, RIGHT]), Shape(2, 2, 2), devices=names)


@pytest.mark.parametrize("microbatches", [0, -1])
def test_a_step_has_a_micro_batch(microbatches: int) -> None:
    with pytest.raises(MicrobatchError, match=f"microbatches must be a positive integer, got {microbatches}"):
        Shape(2, microbatches, 2)


def test_a_step_has_a_stage_and_a_device() -> None:
    with pytest.raises(OptionError, match="stages must be a positive integer, got 0"):
        Shape(0, 1, 2)
    with pytest.raises(OptionError, match="devices must be a positive integer, got -1"):
        Shape(2, 1, -1)


def test_a_check_comes_before_everything_else() -> None:
    with pytest.raises(ScheduleError, match="'gpipe' puts one stage on each device"):
        lower(find_schedule("gpipe"), Shape(1, 1, 2), devices=["too few"])
