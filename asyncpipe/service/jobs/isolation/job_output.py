"""What the code of jobs prints and logs, for the logs of their runs.

::

    print, sys.stderr ── whole lines ───┐
    logging, not asyncpipe's own ───────┴─▶ JobOutput ─▶ say     asyncpipe's own records ─▶ the service's log

In the process of a job all output is the job's. Where several jobs share a process, as those on threads do, a context
variable says whose code it is that prints; what nobody is responsible for goes where it went before. Children that a
job's code forks, and C libraries, write to the descriptors, which know no ``sys.stdout``.
"""

from __future__ import annotations

import logging
import os
import sys
from io import TextIOBase
from threading import RLock
from typing import TextIO
from weakref import WeakKeyDictionary

from asyncpipe.service.jobs.run_log import LONGEST, STREAMS, Saying

__all__ = ["JobOutput", "WholeLines"]


class WholeLines:
    """Makes lines of what is written piece by piece; of a progress bar its last state."""

    def __init__(self) -> None:
        self._rest = ""

    def of(self, text: str) -> str | None:
        """The lines that end in ``text``; ``None`` if none does."""
        *lines, rest = (self._rest + text).split("\n")
        self._rest = rest.rpartition("\r")[2][:LONGEST]
        return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines) if lines else None


class JobOutput(logging.Handler):
    """Takes the output of this process from now on, for the run of ``Saying.here``, or else for ``saying``."""

    def __init__(self, saying: Saying | None = None) -> None:
        super().__init__()
        self._saying = saying
        self._process = os.getpid()
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        self.addFilter(lambda record: not _is_ours(record))
        root = logging.getLogger()
        if saying is not None:
            for handler in root.handlers:
                handler.addFilter(_is_ours)
        root.addHandler(self)
        there = {name: getattr(sys, name) for name in ("stdout", "stderr")}  # A program may have none.
        self._streams = {name: _OutputStream(each, self, name) for name, each in there.items() if each is not None}
        vars(sys).update(self._streams)

    def emit(self, record: logging.LogRecord) -> None:
        """Say a log record."""
        if not self.is_here and self._saying is not None and logging.lastResort is not None:
            logging.lastResort.handle(record)
        elif (saying := self.saying) is not None:
            level = record.levelname.lower()
            saying.say(level if level in STREAMS else "info", self.format(record))

    @property
    def is_here(self) -> bool:
        """Whether this is the process, and not one that was forked from it."""
        return os.getpid() == self._process

    @property
    def saying(self) -> Saying | None:
        """Who takes what is printed here and now."""
        return Saying.here.get(self._saying) if self.is_here else None

    def end(self) -> None:
        """Say the lines that have no end."""
        for stream in self._streams.values():
            stream.end()


class _OutputStream(TextIOBase):
    """In the place of a standard stream, whose descriptor it has."""

    encoding = "utf-8"

    def __init__(self, before: TextIO, output: JobOutput, name: str) -> None:
        self.buffer = before.buffer
        self.fileno, self.flush, self.isatty = before.fileno, before.flush, before.isatty  # type: ignore[method-assign]
        self._before = before
        self._output = output
        self._name = name
        self._turn = RLock()
        self._lines: WeakKeyDictionary[Saying, WholeLines] = WeakKeyDictionary()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if (saying := self._output.saying) is None:
            return self._before.write(text)
        with self._turn:
            if (lines := self._lines.setdefault(saying, WholeLines()).of(text)) is not None:
                saying.say(self._name, lines)
        return len(text)

    def end(self) -> None:
        with self._turn:
            for saying, lines in list(self._lines.items()):
                if rest := lines.of("\n"):
                    saying.say(self._name, rest)


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == "asyncpipe"
