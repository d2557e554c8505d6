"""What ``lower`` refuses: every ScheduleError, and what it says."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

import pytest

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import Phase
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.schedules.protocol import Action, B, F, I, OrderedSchedule, RuledSchedule, Schedule, Shape, W
from asyncpipe.core.schedules.registry import find_schedule
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


RECOMPUTE = Action(TaskKind.RECOMPUTE, 0, 0)
ALLOWED = "is not an action of 2 micro-batches and 2 stages; actions are F, B, I and W with indices from 0"
DEVICE_0, DEVICE_1 = "schedule 'listed', device 0: ", "schedule 'listed', device 1: "
BROKEN = {
    "missing forward": ([LEFT[:3], RIGHT], DEVICE_0 + "B(1,0) is missing"),
    "missing backward": ([LEFT, RIGHT[:3]], DEVICE_1 + "B(1,1) is missing"),
    "nothing": ([LEFT, []], DEVICE_1 + "F(0,1) is missing"),
    "duplicate": ([[*LEFT, F(0, 0)], RIGHT], DEVICE_0 + "F(0,0) is there twice; each action must be there once"),
    "foreign micro-batch": ([[*LEFT, F(2, 0)], RIGHT], DEVICE_0 + "F(2,0) " + ALLOWED),
    "foreign stage": ([[*LEFT, B(0, 2)], RIGHT], DEVICE_0 + "B(0,2) " + ALLOWED),
    "negative stage": ([[*LEFT, B(0, -1)], RIGHT], DEVICE_0 + "B(0,-1) " + ALLOWED),
    "foreign kind": ([[*LEFT, RECOMPUTE], RIGHT], DEVICE_0 + "R(0,0) " + ALLOWED),
    "no action": (
        [[*LEFT, "B0"], RIGHT],
        DEVICE_0 + "'B0' is not an action; give F(i, j), B(i, j), I(i, j) or W(i, j)",
    ),
    "forgotten weights": ([[*LEFT[:3], I(1, 0)], RIGHT], DEVICE_0 + "W(1,0) is missing"),
    "weights alone": ([[*LEFT[:3], W(1, 0)], RIGHT], DEVICE_0 + "W(1,0) comes before I(1,0) and would wait for ever"),
    "weights first": (
        [[*LEFT[:3], W(1, 0), I(1, 0)], RIGHT],
        DEVICE_0 + "W(1,0) comes before I(1,0) and would wait for ever",
    ),
    "whole and half": (
        [[*LEFT, I(1, 0), W(1, 0)], RIGHT],
        DEVICE_0 + "B(1,0) is there beside I(1,0); a backward is B, or I and W",
    ),
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


@pytest.mark.parametrize(
    ("placement", "told"),
    [
        ([0], "places 1 stages, on devices [0]; the step has 2; give one device index for each stage"),
        ([0, 1, 0], "places 3 stages, on devices [0, 1, 0]; the step has 2; give one device index for each stage"),
        ([0, 2], "places stage 1 on device 2, which is missing: there are 2; give indices from 0 to 1"),
        ([-1, 0], "places stage 0 on device -1, which is missing: there are 2; give indices from 0 to 1"),
        ([0, "1"], "places stage 1 on device '1', which is missing: there are 2; give indices from 0 to 1"),
    ],
)
def test_a_bad_placement(placement: list[int], told: str) -> None:
    with pytest.raises(ScheduleError) as raised:
        lower(Listed([LEFT, RIGHT], placement), Shape(2, 2, 2))
    assert str(raised.value) == f"schedule 'listed' {told}"


def raising(*_: object) -> object:
    raise ZeroDivisionError("oh")


class Ruled(RuledSchedule):
    def priority(self, action: Action, shape: Shape) -> int:
        return 0


@pytest.mark.parametrize(
    ("schedule", "method", "told"),
    [
        (Listed([LEFT, RIGHT]), "check", "schedule 'listed': check"),
        (Listed([LEFT, RIGHT]), "placement", "schedule 'listed': placement"),
        (Listed([LEFT, RIGHT]), "order", "schedule 'listed', device 0"),
        (Ruled(), "actions", "schedule 'Ruled', device 0"),
        (Ruled(), "priority", "schedule 'Ruled': priority of F(0,0)"),
        (Ruled(), "admit", "schedule 'Ruled', device 0: admit(F(0,0), 0)"),
    ],
)
def test_what_a_plug_in_raises_is_told_as_its_fault(schedule: Schedule, method: str, told: str) -> None:
    setattr(schedule, method, raising)
    with pytest.raises(ScheduleError) as raised:
        lower(schedule, Shape(2, 2, 2))
    assert str(raised.value) == f"{told} raised ZeroDivisionError: oh"
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("method", "answer", "told"),
    [
        ("admit", lambda action, live, shape: live > 0, r", device 0: F\(0,0\) is refused by a device that holds no"),
        ("priority", lambda action, shape: "a" if action.stage else 1, ": comparing priorities raised TypeError"),
    ],
)
def test_a_rule_that_admits_nothing_or_does_not_compare(method: str, answer: object, told: str) -> None:
    rule = Ruled()
    setattr(rule, method, answer)
    with pytest.raises(ScheduleError, match=f"'Ruled'{told}"):
        lower(rule, Shape(2, 2, 2))


def test_a_schedule_of_neither_kind() -> None:
    class Neither(Schedule):
        pass

    with pytest.raises(ScheduleError, match=r"'Neither' is neither an OrderedSchedule nor a RuledSchedule"):
        lower(Neither(), Shape(2, 2, 2))


@pytest.mark.parametrize("names", [[], ["a"], ["a", "b", "c"], ["a", "a"], ["a", "b", "b"]])
def test_as_many_different_device_names_as_devices(names: list[str]) -> None:
    with pytest.raises(ScheduleError, match="expected 2 different ones"):
        lower(Listed([LEFT, RIGHT]), Shape(2, 2, 2), devices=names)


def test_a_shape_has_a_micro_batch_a_stage_and_a_device() -> None:
    with pytest.raises(MicrobatchError, match="microbatches must be a positive integer, got 0"):
        Shape(2, 0, 2)
    with pytest.raises(OptionError, match="stages must be a positive integer, got 0"):
        Shape(0, 1, 2)
    with pytest.raises(OptionError, match="devices must be a positive integer, got -1"):
        Shape(2, 1, -1)


ONE_EACH = "'{}' puts one stage on each device, got 4 stages for 2 devices"
AS_MANY_EACH = "'{}' needs the same number of stages on each device.*give a multiple of 2"
THERE_AND_BACK = "'{}' needs .* each device, got 5 stages for 2 devices; give .*4"


@pytest.mark.parametrize(
    ("name", "stages", "told"),
    [
        *((name, 4, ONE_EACH) for name in ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2")),
        *((name, 5, AS_MANY_EACH) for name in ("interleaved", "looped-bfs", "interleaved-zb")),
        *((name, 5, THERE_AND_BACK) for name in ("zbv", "v-half", "v-min", "dualpipev", "hanayo")),
    ],
)
def test_a_number_of_stages_that_a_schedule_cannot_place(name: str, stages: int, told: str) -> None:
    with pytest.raises(ScheduleError, match=told.format(name)):
        lower(find_schedule(name), Shape(stages, 32, 2))
