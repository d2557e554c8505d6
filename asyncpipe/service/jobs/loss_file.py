"""The loss curve of a job: ``losses.jsonl`` has one line for each step, however often the job was killed and resumed.

::

    {"step": 41, "loss": 1.2345678901234567, "learning_rate": 0.003, "seconds": 0.12, "tokens": 4096}

Steps increase from line to line. A run that resumes from an earlier step cuts off the lines of the steps that it
repeats, so each step is there once, as in a run without interruption. Numbers are written so that reading returns the
same bits. A line is passed to the operating system before the snapshot of its step begins, so after a kill the file has
all steps of the newest snapshot. A step is found by binary search, since its line number is not known.
"""

from __future__ import annotations

import json
import os
from collections import deque
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from asyncpipe.service.whole_writes import write_whole

__all__ = ["LossFile", "LossRow", "copy_losses", "read_losses", "spread_losses"]

NAME = "losses.jsonl"
LONGEST = 1024
"""Bytes that are read at once; at least four times the longest line."""
MOST_PENDING = 100_000
"""Rows kept in memory while the disk is full."""


class LossRow(NamedTuple):
    """One training step of a job."""

    step: int
    """From 1."""
    loss: float
    learning_rate: float
    seconds: float
    tokens: int

    def line(self) -> bytes:
        """The row as a line of the file. Infinite numbers and NaN become texts, since JSON has none."""
        table = {
            key: value if isinstance(value, int) or isfinite(value) else repr(value)
            for key, value in self._asdict().items()
        }
        return json.dumps(table).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> LossRow | None:
        """The row in ``line``; ``None`` if the line is damaged."""
        try:
            table = json.loads(line)
            loss, rate, seconds = (float(table[key]) for key in ("loss", "learning_rate", "seconds"))
            return cls(int(table["step"]), loss, rate, seconds, int(table["tokens"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None


class LossFile:
    """The file in ``folder``, open for appending, for one thread at a time. Every method may raise ``OSError``."""

    def __init__(self, folder: Path) -> None:
        """Removes an incomplete last line, which a killed process may have left."""
        self._descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
        self._pending: deque[LossRow] = deque(maxlen=MOST_PENDING)
        try:
            self._size, self._last = _repair(self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, row: LossRow) -> None:
        """Write ``row`` and drop the rows of its step and later ones.

        Rows that a full disk refuses are kept and written before the next row.
        """
        if row.step <= self._last:
            self._size = _offset(self._descriptor, self._size, row.step)
            os.ftruncate(self._descriptor, self._size)
            self._last = row.step - 1
        while self._pending and self._pending[-1].step >= row.step:
            self._pending.pop()
        self._pending.append(row)
        self._write_pending()

    def close(self) -> None:
        """Try once more to write the rows that the disk refused, and close the file."""
        try:
            self._write_pending()
        finally:
            os.close(self._descriptor)

    def _write_pending(self) -> None:
        while self._pending:
            line = self._pending[0].line()
            write_whole(self._descriptor, line, self._size)
            self._size += len(line)
            self._last = self._pending.popleft().step


def read_losses(folder: Path, after: int, limit: int) -> list[LossRow]:
    """At most ``limit`` rows of the job in ``folder`` with steps after ``after``; none if there is no file yet. Blocks.

    The job may be writing meanwhile. Raises ``OSError``.
    """
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        return []
    with os.fdopen(descriptor, "rb") as file:
        file.seek(_offset(descriptor, os.fstat(descriptor).st_size, after + 1))
        rows: list[LossRow] = []
        # A last line without a newline is still being written.
        while len(rows) < limit and (line := file.readline()).endswith(b"\n"):
            row = LossRow.parse(line)
            if row is not None and row.step > after:
                rows.append(row)
        return rows


def spread_losses(folder: Path, most: int) -> list[LossRow]:
    """At most ``most`` rows of the job in ``folder``, evenly spread from its first step to its last. Blocks.

    Takes as long for a million steps as for a thousand. The job may be writing meanwhile. Raises ``OSError``.
    """
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        return []
    try:
        size = os.fstat(descriptor).st_size
        rows: dict[int, LossRow] = {}
        # Lines are about equally long, so what is evenly spread over bytes is evenly spread over steps.
        for number in range(most):
            place = (size - 1) * number // max(most - 1, 1)
            start, end = _line_around(descriptor, size, max(place, 0)) if size else (0, 0)
            row = LossRow.parse(_read(descriptor, start, end - start))
            if row is not None:
                rows[row.step] = row
        return [rows[step] for step in sorted(rows)]
    finally:
        os.close(descriptor)


def copy_losses(folder: Path, to: Path, until: int) -> None:
    """Begin the losses of the job in ``to`` with those of the one in ``folder``, up to step ``until``. Blocks.

    The one may be writing meanwhile. Raises ``OSError``.
    """
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        return
    with os.fdopen(descriptor, "rb") as file, (to / NAME).open("xb") as copy:
        left = _offset(descriptor, os.fstat(descriptor).st_size, until + 1)
        file.seek(0)
        while left and (block := file.read(min(left, 2**20))):
            copy.write(block)
            left -= len(block)


def _repair(descriptor: int) -> tuple[int, int]:
    """(bytes, last step) of the file, after damaged lines at its end were cut off."""
    size = os.fstat(descriptor).st_size
    while size:
        start, end = _line_around(descriptor, size, size - 1)
        row = LossRow.parse(_read(descriptor, start, end - start))
        if row is not None and end == size and _read(descriptor, size - 1, 1) == b"\n":
            return size, row.step
        os.ftruncate(descriptor, start)
        size = start
    return 0, 0


def _offset(descriptor: int, size: int, step: int) -> int:
    """The offset of the first line with at least ``step``; ``size`` if there is none."""
    low, high = 0, size
    while low < high:
        start, end = _line_around(descriptor, high, (low + high) // 2)
        row = LossRow.parse(_read(descriptor, start, end - start))
        # A damaged line counts as later than all steps: it is mostly the last one, and readers skip early lines.
        if row is not None and row.step < step:
            low = end
        else:
            high = start
    return low


def _line_around(descriptor: int, size: int, place: int) -> tuple[int, int]:
    """(start, end), newline included, of the line that contains the byte at ``place``, in the first ``size`` bytes."""
    start = place
    while start:
        block = min(start, LONGEST)
        found = _read(descriptor, start - block, block).rfind(b"\n")
        if found >= 0:
            start += found + 1 - block
            break
        start -= block
    end = place
    while end < size:
        text = _read(descriptor, end, min(LONGEST, size - end))
        found = text.find(b"\n")
        if found >= 0 or not text:
            return start, end + found + 1 if text else size
        end += len(text)
    return start, size


def _read(descriptor: int, start: int, length: int) -> bytes:
    os.lseek(descriptor, start, os.SEEK_SET)
    return os.read(descriptor, length)
