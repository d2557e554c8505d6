"""What the runs of a job said: prints, log records and tracebacks, as lines in files of the job's folder.

::

    jobs/ID/said/run-2.0000.log, run-2.0001.log …    the second run's, a MiB each
    1796000000.123 stderr the text of a line

Whoever has something to say appends it at once: the service, and the job's own process. So what was said is there if
either is killed, and costs the service nothing. A run keeps its first ``HEAD`` and its last ``TAIL`` parts, and a job
its last ``KEPT_RUNS`` runs; where parts are missing, a reader is told so. A place in what was said is one number, which
is made of run, part and offset: a reader that comes back with the last one has missed nothing.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from threading import RLock
from typing import ClassVar, NamedTuple

from asyncpipe.train.redaction import redacted

__all__ = ["STREAMS", "RunLog", "SaidLine", "SaidPage", "Saying", "last_said", "place_of", "read_said", "runs_in"]

SAID = "said"
STREAMS = ("stdout", "stderr", "traceback", "service", "debug", "info", "warning", "error", "critical")
"""Where a line comes from; the last five are levels of ``logging``."""
PART = 1 << 20
"""Bytes after which a part is full."""
HEAD = TAIL = 5
KEPT_RUNS = 5
LONGEST = 16 * 1024
"""Characters of one line."""
PAGE = 256 * 1024
"""Bytes that are read at once."""
_PART = re.compile(r"run-(\d+)\.(\d+)\.log")
_LINE = re.compile(rf"(\d+\.\d+) ({'|'.join(STREAMS)}) (.*)")


class Saying:
    """Takes what a run says."""

    here: ClassVar[ContextVar[Saying | None]] = ContextVar("asyncpipe job that prints")
    """The run whose code it is that prints in this context, on threads that jobs share."""

    def say(self, stream: str, text: str) -> None:
        """Keep the lines of ``text``, which comes from one of ``STREAMS``."""


class RunLog(Saying):
    """Appends to what the run of this number said. From any thread, and from several processes; raises nothing."""

    def __init__(self, folder: Path, run: int) -> None:
        """``folder`` is the job's."""
        self.folder = folder
        self.run = run
        self._turn = RLock()
        self._file: int | None = None
        self._part = -1
        self._lost = 0

    def __reduce__(self) -> tuple[type[RunLog], tuple[Path, int]]:
        return RunLog, (self.folder, self.run)

    def say(self, stream: str, text: str) -> None:
        lines = redacted("\n".join(line[:LONGEST] for line in text[:PART].split("\n"))).removesuffix("\n").split("\n")
        with self._turn:
            # On a full disk the job goes on. The last line may have been written in part.
            lost = f"\n{time.time():.3f} service {self._lost} lines are lost here: the disk was full\n"
            head = f"{time.time():.3f} {stream} "
            data = "".join([lost if self._lost else "", *(f"{head}{line}\n" for line in lines)])
            try:
                self._append(data.encode("utf-8", "backslashreplace"))
            except OSError:
                self._lost += len(lines)
            else:
                self._lost = 0

    def close(self) -> None:
        """Give the file back; it may be used again."""
        with self._turn:
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def _append(self, data: bytes) -> None:
        while self._file is None or os.fstat(self._file).st_size >= PART:
            self._begin_part()
        if os.write(self._file, data) < len(data):
            raise OSError(ENOSPC, os.strerror(ENOSPC))

    def _begin_part(self) -> None:
        is_full = self._file is not None
        self.close()
        (self.folder / SAID).mkdir(parents=True, exist_ok=True, mode=0o700)
        there = _parts(self.folder)
        # Another process may have begun it.
        self._part = max([self._part + is_full, 0, *(part for run, part in there if run == self.run)])
        path = _path(self.folder, self.run, self._part)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for run, part in there:
            if run <= self.run - KEPT_RUNS or (run == self.run and HEAD <= part <= self._part - TAIL):
                _path(self.folder, run, part).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class SaidLine:
    """One line that a run said."""

    at: float
    """Unix time."""
    stream: str
    """One of ``STREAMS``."""
    text: str


class SaidPage(NamedTuple):
    """Lines of one run."""

    run: int
    next: int
    """The place of what was said after them."""
    lines: list[SaidLine]


def place_of(run: int, part: int = 0, offset: int = 0) -> int:
    """The number of a place, below 2**53 for the first 8192 runs."""
    return run << 40 | part << 23 | offset


def runs_in(folder: Path) -> list[int]:
    """The runs of the job in ``folder`` that have said something that is kept, oldest first. Blocks."""
    return sorted({run for run, _ in _parts(folder)})


def read_said(folder: Path, place: int, most: int = PAGE) -> SaidPage:
    """What the job in ``folder`` said from ``place`` on: at most so many bytes, and of one run. Blocks."""
    here, offset = (place >> 40, place >> 23 & 0x1FFFF), place & 0x7FFFFF
    there = _parts(folder)
    for at in (each for each in there if each >= here):
        begin, data = offset if at == here else 0, b""
        with suppress(FileNotFoundError), _path(folder, *at).open("rb") as file:  # It may be removed meanwhile.
            file.seek(begin)
            data = file.read(most)
        if end := data.rfind(b"\n") + 1:
            found = map(_LINE.fullmatch, data[:end].decode("utf-8", "replace").split("\n"))
            lines = [SaidLine(float(line[1]), line[2], line[3]) for line in found if line]
            if lines and at[0] == here[0] and (at[1] > here[1] + 1 or here not in there):
                kept = f"a run keeps its first {HEAD} MiB and its last {TAIL}"
                lines.insert(0, SaidLine(lines[0].at, "service", f"about {at[1] - here[1]} MiB are cut here: {kept}"))
            return SaidPage(at[0], place_of(*at, begin + end), lines)
    return SaidPage(here[0], place, [])


def last_said(folder: Path, run: int, count: int, stream: str | None = None) -> SaidPage:
    """The last ``count`` lines of a run, or of a stream of it, as far as its last two parts have them. Blocks."""
    parts = [part for each, part in _parts(folder) if each == run]
    found, following = deque[SaidLine](maxlen=count), place_of(run, *parts[-2:][:1])
    while (page := read_said(folder, following)).lines and page.run == run:
        following = page.next
        found += [line for line in page.lines if stream in (None, line.stream)]
    return SaidPage(run, following, list(found))


def _parts(folder: Path) -> list[tuple[int, int]]:
    """The numbers of the runs and their parts, in order."""
    with suppress(FileNotFoundError):
        names = map(_PART.fullmatch, os.listdir(folder / SAID))
        return sorted((int(name[1]), int(name[2])) for name in names if name)
    return []


def _path(folder: Path, run: int, part: int) -> Path:
    return folder / SAID / f"run-{run}.{part:04}.log"
