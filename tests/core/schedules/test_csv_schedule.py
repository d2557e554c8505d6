"""Schedules out of CSV files: found by the name of the file, for the shape of the file alone."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.csv_notation import CsvSchedule, read_csv, read_schedule
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import ScheduleError

ONE_F_ONE_B = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"
"""1F1B of two stages and two micro-batches."""


def read(text: str) -> CsvSchedule:
    return read_csv(text, "text")


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
        lower(read(ONE_F_ONE_B), shape)
    own, got = (f"{s} stages, {m} micro-batches and {p} devices" for s, m, p in ((2, 2, 2), astuple(shape)))
    advice = "use it for its own shape, or write a file for this one"
    assert str(raised.value) == f"schedule 'text' is for {own}, got {got}; {advice}"
