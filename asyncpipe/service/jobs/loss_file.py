"""The loss curve of a job: ``losses.jsonl``, one line a step, however often the job was killed and went on.

::

    {"step": 41, "loss": 1.2345678901234567, "learning_rate": 0.003, "seconds": 0.12, "tokens": 4096}

Steps only go up from line to line. A run that goes back to an earlier step (its last snapshot) cuts off what it will do
again, so each step is there once and the curve is that of a run that never ended. Numbers are written so that they are
read back to the last bit. A line is handed to the operating system before the step's snapshot is begun: whatever
snapshot there is after a kill, its steps are in the curve. Lines are in order, so a place in a file of weeks is found
by halving.
"""

from __future__ import annotations

import json
import os
from collections import deque
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from asyncpipe.service.whole_writes import write_whole

__all__ = ["LossFile", "LossRow", "read_losses"]

NAME = "losses.jsonl"
LONGEST = 1024
"""Bytes of a line; none that is written has a quarter of it."""
MOST_PENDING = 100_000
"""Lines that wait for room on the disk."""


class LossRow(NamedTuple):
    """One training step of a job."""

    step: int
    """From 1."""
    loss: float
    learning_rate: float
    seconds: float
    tokens: int

    def line(self) -> bytes:
        """As the file has it. Numbers that are not finite are texts there, since JSON has none."""
        table = {
            key: value if isinstance(value, int) or isfinite(value) else repr(value)
            for key, value in self._asdict().items()
        }
        return json.dumps(table).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> LossRow | None:
        """The row in ``line``; ``None`` for a damaged one."""
        try:
            table = json.loads(line)
            loss, rate, seconds = (float(table[key]) for key in ("loss", "learning_rate", "seconds"))
            return cls(int(table["step"]), loss, rate, seconds, int(table["tokens"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None


class LossFile:
    """The file in ``folder``, open for more lines; used by one thread at a time. Every method may raise ``OSError``."""

    def __init__(self, folder: Path) -> None:
        """Cuts off a last line that a killed process left unfinished."""
        self._descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
        self._pending: deque[LossRow] = deque(maxlen=MOST_PENDING)
        try:
            self._size, self._last = _repair(self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, row: LossRow) -> None:
        """Write ``row``, behind the steps before its own; those from it on are dropped.

        What a full disk does not take is tried again with the next row, before that.
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
        """Write what there was no room for, if there is now, and close the file."""
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
    """At most ``limit`` rows of the job in ``folder``, from the first step behind ``after`` on. Blocks.

    Also while the job writes them. Raises ``OSError``; where there is no file yet, there are no rows.
    """
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        return []
    with os.fdopen(descriptor, "rb") as file:
        file.seek(_offset(descriptor, os.fstat(descriptor).st_size, after + 1))
        rows: list[LossRow] = []
        # A last line without its end is still being written.
        while len(rows) < limit and (line := file.readline()).endswith(b"\n"):
            row = LossRow.parse(line)
            if row is not None and row.step > after:
                rows.append(row)
        return rows


def _repair(descriptor: int) -> tuple[int, int]:
    """(bytes, last step) of the file, after what is damaged at its end was cut off."""
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
    """Where the first line of a step from ``step`` on begins; ``size`` where there is none."""
    low, high = 0, size
    while low < high:
        start, end = _line_around(descriptor, high, (low + high) // 2)
        row = LossRow.parse(_read(descriptor, start, end - start))
        # A damaged line counts as behind all others: it mostly is, and whoever reads from too early a place skips.
        if row is not None and row.step < step:
            low = end
        else:
            high = start
    return low


def _line_around(descriptor: int, size: int, place: int) -> tuple[int, int]:
    """Where the line begins and ends, its newline included, that has the byte at ``place`` of the first ``size``."""
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
