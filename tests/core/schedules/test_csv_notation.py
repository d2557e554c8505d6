"""The CSV notation: reading returns what was written, errors name the row and column; files as schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from itertools import product
from pathlib import Path
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from random_graphs import RandomOrder

from asyncpipe.core.graph.export import write_csv
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.csv_notation import CsvSchedule, read_csv, read_schedule
from asyncpipe.core.schedules.protocol import (
    Action,
    B,
    F,
    I,
    OrderedSchedule,
    Overlap,
    Schedule,
    Shape,
    W,
    flat,
)
from asyncpipe.core.schedules.registry import find_schedule, known_schedules
from asyncpipe.errors import ScheduleError

ONE_F_ONE_B = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"
"""1F1B of two stages and two micro-batches."""
ORDERED = [name for name in known_schedules() if isinstance(find_schedule(name), OrderedSchedule)]
SHAPES = [Shape(v * p, m, p) for p, v, m in product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4, 8, 11))]


def allowed(schedule: Schedule) -> Iterator[Shape]:
    """The shapes of the table that ``schedule`` can serve."""
    for shape in SHAPES:
        try:
            schedule.check(shape)
        except ScheduleError:
            continue
        yield shape


def orders_of(schedule: OrderedSchedule, shape: Shape) -> tuple[tuple[Action | Overlap, ...], ...]:
    return tuple(tuple(schedule.order(device, shape)) for device in range(shape.devices))


# Round trips.


@pytest.mark.parametrize("name", ORDERED)
def test_what_is_written_is_read_back(name: str) -> None:
    schedule = find_schedule(name)
    assert isinstance(schedule, OrderedSchedule)
    shapes = list(allowed(schedule))
    assert len(shapes) >= 5
    for shape in shapes:
        text = write_csv(schedule, shape)
        back = read_csv(text, name)
        assert back.shape == shape
        assert back.orders == orders_of(schedule, shape)
        assert list(back.placement(shape)) == list(schedule.placement(shape))
        assert back.virtual == shape.stages // shape.devices
        assert write_csv(back, shape) == text


def test_one_f_one_b_as_torch_writes_it() -> None:
    assert write_csv(find_schedule("1f1b"), Shape(2, 2, 2)) == ONE_F_ONE_B


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(0, 3), st.integers(1, 4))
def test_any_order_that_can_run_is_read_back(draw: Random, devices: int, more: int, microbatches: int) -> None:
    shape = Shape(devices + more, microbatches, devices)
    drawn = RandomOrder(shape, draw)
    assume(set(drawn.placement(shape)) == set(range(devices)))
    orders = [list(order) for order in orders_of(drawn, shape)]
    for order in orders:
        for k in range(len(order) - 1, 0, -1):
            first, second = order[k - 1 : k + 1]
            fits = isinstance(second, Action) and first.kind is TaskKind.FORWARD and second.kind in "BI"
            if fits and draw.random() < 0.5:
                order[k - 1 : k + 1] = [Overlap(first, second)]
    schedule = CsvSchedule(tuple(map(tuple, orders)), shape, "random")
    assert read_csv(write_csv(schedule, shape), "random") == schedule


# What is tolerated.

TOLERATED = {
    "space around cells": " 0F0 ,0F1\t, ,  0B0,,0B1 \n,1F0,1B0,1F1,1B1,\n",
    "quoted cells": '"0F0","0F1","","0B0",,"0B1"\n,1F0, "1B0",1F1,1B1,\n',
    "carriage returns": ONE_F_ONE_B.replace("\n", "\r\n"),
    "carriage returns alone": ONE_F_ONE_B.replace("\n", "\r"),
    "no newline at the end": ONE_F_ONE_B.rstrip("\n"),
    "blank lines at the end": ONE_F_ONE_B + "\n \n,,\n\n",
    "blank cells at the end": ONE_F_ONE_B.replace("\n", ",,,\n"),
    "no blank cells": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1",
    "a byte order mark": "\ufeff" + ONE_F_ONE_B,
    "leading zeros": "00F0,0F01,0B0,0B1\n1F0,1B0,1F1,1B1",
}


@pytest.mark.parametrize("text", TOLERATED.values(), ids=TOLERATED)
def test_it_is_one_f_one_b_all_the_same(text: str) -> None:
    assert read_csv(text, "text") == read_csv(ONE_F_ONE_B, "text")


# What is refused.

CELLS = "2F0junk 0F1; F0 ²F0 0F 00 0X1 0f1 0FB1 0R1 -1F0 0F-1 0F1234567 (0F0;1B0 (0F0;1B0)OVERLAP (0F0)OVERLAP_F_B"
CELLS += " (0F0;1B0;1B1)OVERLAP_F_B (1B0;0F0)OVERLAP_F_B (0F0;0F1)OVERLAP_F_B (0F0;1W0)OVERLAP_F_B"
LOWERED = "0UNSHARD 0RESHARD 0REDUCE_GRAD 0SEND_F0 1RECV_F0 1SEND_B0 0RECV_B0"


@pytest.mark.parametrize("cell", [*CELLS.split(), *LOWERED.split()])
def test_a_malformed_cell_is_refused_with_its_place(cell: str) -> None:
    fault = "belongs to torch's lowered form" if cell in LOWERED.split() else "is no action; a cell is empty, "
    with pytest.raises(ScheduleError) as raised:
        read_csv(f"0F0,0B0\n1F0,1B0,{cell}", "text")
    place = "schedule 'text', row 2, column 3 (both counted from 1): "
    assert str(raised.value).startswith(f"{place}{cell!r} {fault}")


@given(st.lists(st.sampled_from('0123FBIW,\n;()" \r-') | st.just("OVERLAP_F_B")).map("".join))
def test_any_text_is_a_schedule_or_a_schedule_error(text: str) -> None:
    try:
        found = read_csv(text, "text")
        lower(found, found.shape)
    except ScheduleError as error:
        assert str(error).startswith("schedule 'text'")  # noqa: PT017 - either outcome is right
    else:
        forwards = (action for order in found.orders for action in flat(order) if action.kind is TaskKind.FORWARD)
        assert sorted(forwards) == [
            F(i, j) for i, j in product(range(found.shape.microbatches), range(found.shape.stages))
        ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0,,0F0", ", device 0: F(0,0) is there twice; each action must be there once"),
        ("0F0,0B0\n1F0,1B0,0F1,0B1", ", device 0: F(0,0) belongs to device 1, where stage 0 is placed"),
        ("0F0,0B0\n,1B0,1F0", ", device 1: B(0,1) comes before F(0,1) and would wait for ever"),
        ("0F999999", ", device 0: F(0,0) is missing"),
        ("0F0,0B0\n2F0,2B0", ": stage 1 is in no row; stages count from 0 without a gap"),
        ("0F0,0B0,999999F0", ": stage 1 is in no row"),
        ("", " has no actions; give one row of actions per device"),
        (",,\n \n", " has no actions; give one row of actions per device"),
        ("0F0,0B0\n" + 200000 * "x", ", row 2 (counted from 1) is not CSV: field larger than"),
        ('0F0,0B0\n1F0,"1B0', ", row 2 (counted from 1) is not CSV: unexpected end of data"),
    ],
)
def test_what_is_no_step_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as raised:
        lower(found := read_csv(text, "text"), found.shape)
    assert str(raised.value).startswith(f"schedule 'text'{message}")


# What cannot be written.


class Entries(OrderedSchedule):
    """The same entries on device 0, whatever the shape; all stages are there."""

    name = "entries"

    def __init__(self, *entries: Action | Overlap) -> None:
        self._entries = entries

    def order(self, device: int, shape: Shape) -> tuple[Action | Overlap, ...]:
        return () if device else self._entries

    def placement(self, shape: Shape) -> list[int]:
        return [0] * shape.stages

    def check(self, shape: Shape) -> None:
        pass


@pytest.mark.parametrize(
    ("overlap", "others"),
    [
        (Overlap(B(0, 0), F(1, 0)), [B(1, 0)]),
        (Overlap(F(1, 0), F(2, 0)), [B(0, 0), B(1, 0), B(2, 0)]),
        (Overlap(I(0, 0), W(0, 0)), [F(1, 0), B(1, 0)]),
    ],
    ids=str,
)
def test_an_overlap_that_has_no_form(overlap: Overlap, others: list[Action]) -> None:
    schedule = Entries(F(0, 0), overlap, *others)
    with pytest.raises(ScheduleError) as raised:
        write_csv(schedule, Shape(1, 1 + max(action.microbatch for action in (*overlap, *others)), 1))
    fault = f"the CSV form has no overlap of {overlap}; give a forward, then a B or an I"
    assert str(raised.value) == f"schedule 'entries', device 0: {fault}"


def test_a_device_without_a_stage_has_no_form() -> None:
    with pytest.raises(ScheduleError, match=r"'entries' places no stage on device 1.*give fewer devices"):
        write_csv(Entries(F(0, 0), B(0, 0)), Shape(1, 1, 2))


def test_a_rule_has_no_form() -> None:
    hinted = find_schedule("1f1b", order="hint")
    with pytest.raises(ScheduleError, match=r"'1f1b as hint' decides by a rule; only an ordered schedule has a CSV"):
        write_csv(hinted, Shape(2, 2, 2))


# Files.


def written(folder: Path, content: str | bytes = ONE_F_ONE_B) -> str:
    path = folder / "my schedule.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_a_file_is_a_schedule(tmp_path: Path) -> None:
    path = written(tmp_path)
    schedule = find_schedule(f"csv:{path}")
    assert schedule == read_schedule(path)
    assert hash(schedule) == hash(read_schedule(path))
    assert schedule.name == f"csv:{path}"
    times = report(simulate(lower(schedule, Shape(2, 2, 2))))
    assert times.tasks == report(simulate(lower(find_schedule("1f1b"), Shape(2, 2, 2)))).tasks


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nowhere.csv", "the file cannot be read: No such file or directory; give csv:FILE"),
        ("", "the file cannot be read: No such file or directory; give csv:FILE"),
        (".", "the file cannot be read: Is a directory; give csv:FILE"),
        ("a\0b", "the file cannot be read: embedded null byte; give csv:FILE"),
    ],
    ids=["missing", "no name", "folder", "no path"],
)
def test_a_file_that_cannot_be_read(path: str, reason: str) -> None:
    with pytest.raises(ScheduleError) as raised:
        read_schedule(path)
    assert str(raised.value) == f"schedule {'csv:' + path!r}: {reason}"


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"my schedule.csv': the file is not UTF-8 text: .*; give a CSV file"):
        read_schedule(written(tmp_path, ONE_F_ONE_B.encode("utf-16")))


@pytest.mark.parametrize("shape", [Shape(2, 3, 2), Shape(4, 2, 2), Shape(2, 2, 1)], ids=str)
def test_another_shape_is_refused(shape: Shape) -> None:
    with pytest.raises(ScheduleError) as raised:
        lower(read_csv(ONE_F_ONE_B, "text"), shape)
    own, got = (f"{s} stages, {m} micro-batches and {p} devices" for s, m, p in ((2, 2, 2), astuple(shape)))
    advice = "use it for its own shape, or write a file for this one"
    assert str(raised.value) == f"schedule 'text' is for {own}, got {got}; {advice}"
