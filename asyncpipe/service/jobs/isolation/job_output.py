"""What the code of a job prints and logs in the job's own process: notes for the job's log, up to a limit.

::

    print, sys.stderr ── line by line ──┐
    logging, not asyncpipe's own ───────┴─▶ JobOutput.tell ─▶ a note     asyncpipe's own records ─▶ the service's log

Children that the job's code forks print and log as the service does. So do C libraries, which know no ``sys.stdout``.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from io import TextIOBase
from threading import RLock
from typing import TextIO

__all__ = ["JobOutput"]

MOST_CHARACTERS = 64 * 1024
LEAST_CHARACTERS = 64
"""For how many a shorter line counts: short ones are many."""
LONGEST_LINE = 2000


class JobOutput(logging.Handler):
    """Takes the output of this process from now on; ``note`` gets a level of ``logging`` and a text."""

    def __init__(self, note: Callable[[int, str], object]) -> None:
        super().__init__()
        self._note = note
        self._left = MOST_CHARACTERS
        self._process = os.getpid()
        self.turn = RLock()
        self.addFilter(lambda record: not _is_ours(record))
        root = logging.getLogger()
        for handler in root.handlers:
            handler.addFilter(_is_ours)
        root.addHandler(self)
        self._streams = _OutputStream(sys.stdout, self), _OutputStream(sys.stderr, self)
        sys.stdout, sys.stderr = self._streams

    def emit(self, record: logging.LogRecord) -> None:
        """Tell a log record."""
        if self.is_here:
            self.tell(record.levelno, self.format(record))
        elif logging.lastResort is not None:
            logging.lastResort.handle(record)

    @property
    def is_here(self) -> bool:
        """Whether this is the process, and not one that was forked from it."""
        return os.getpid() == self._process

    def tell(self, level: int, text: str) -> None:
        """Note ``text``, unless it is empty or too much was told."""
        with self.turn:
            if not text.strip() or self._left <= 0:
                return
            self._left -= max(len(text), LEAST_CHARACTERS)
            self._note(level, text[:LONGEST_LINE])
            if self._left <= 0:
                self._note(logging.WARNING, f"the rest of its output is cut: a run shows {MOST_CHARACTERS} characters")

    def end(self) -> None:
        """Tell the lines that have no end."""
        for stream in self._streams:
            stream.write("\n")


class _OutputStream(TextIOBase):
    """In the place of a standard stream, whose descriptor it has."""

    encoding = "utf-8"

    def __init__(self, before: TextIO, output: JobOutput) -> None:
        self.buffer = before.buffer
        self.fileno, self.flush = before.fileno, before.flush  # type: ignore[method-assign]
        self._before = before
        self._output = output
        self._rest = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not self._output.is_here:
            return self._before.write(text)
        with self._output.turn:
            *lines, rest = (self._rest + text).split("\n")
            self._rest = rest.rpartition("\r")[2][:LONGEST_LINE]  # Of a progress bar its last state.
            for line in lines:
                self._output.tell(logging.INFO, line.rstrip("\r").rpartition("\r")[2])
        return len(text)


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == "asyncpipe"
