"""Samples of the resources that a process holds, and a statistical test of whether they grow.

``measure`` takes one sample, ``trend`` fits a line to many. Neighbouring samples are correlated and so carry less
information than independent ones: the standard error of the slope is widened by the autocorrelation of the residuals.
A slope above three standard errors is growth; above two it is unclear, and only a longer soak can decide.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from math import sqrt
from pathlib import Path
from statistics import fmean
from types import AsyncGeneratorType, CoroutineType
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

__all__ = ["MEASURES", "Slope", "Trend", "measure", "slope", "spark", "trend"]

MEASURES: Mapping[str, str] = {
    "rss": "memory (RSS), MiB",
    "heap": "of it in use (malloc), MiB",
    "objects": "Python objects",
    "tensors": "tensors",
    "coroutines": "coroutines",
    "threads": "threads",
    "pooled": "threads of loops' pools",
    "files": "file descriptors",
}
"""The sampled quantities, each with its title in the report."""

POOLS = ("uvloop_", "asyncio_")
"""Name prefixes of the threads of event loops' default thread pools."""
GROWTH, UNCLEAR = 3.0, 2.0
"""Standard errors above which a slope is growth, or unclear."""
MOST_CORRELATED = 0.95
BARS = "▁▂▃▄▅▆▇█"


def measure() -> dict[str, float]:
    """One sample of ``MEASURES``, after a garbage collection. Takes a good part of a second.

    Memory and file descriptors come from ``/proc`` and are missing on systems without it. The heap is what glibc has
    handed out and not got back; the rest of the RSS is free memory that glibc keeps. Threads of an event loop's pool
    are counted separately: the pool adds a thread whenever all are busy, up to a limit, and never ends one.
    """
    gc.collect()
    kinds = Counter(_kinds())
    held = {
        "objects": float(kinds.total()),
        "tensors": float(sum(number for kind, number in kinds.items() if issubclass(kind, Tensor))),
        "coroutines": float(kinds[CoroutineType] + kinds[AsyncGeneratorType]),
    }
    names = [thread.name for thread in threading.enumerate()]
    held["pooled"] = float(sum(name.startswith(POOLS) for name in names))
    held["threads"] = len(names) - held["pooled"]
    if (heap := _heap()) is not None:
        held["heap"] = heap / 2**20
    process = Path("/proc/self")
    if (process / "statm").exists():
        resident = int((process / "statm").read_text(encoding="ascii").split()[1])
        held["rss"] = resident * os.sysconf("SC_PAGE_SIZE") / 2**20
        held["files"] = float(len(os.listdir(process / "fd")))
    return held


class _Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of ``malloc.h``."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def _heap() -> int | None:
    """Bytes allocated from the C library, in all of its arenas; ``None`` without ``mallinfo2``."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def _kinds() -> list[type]:
    """The type of every object that the garbage collector tracks.

    Everything happens inside one C call, during which no other thread runs. Otherwise ``gc.get_objects()`` could return
    a tuple that another thread is still building, and that thread would fail because of the extra reference.
    """
    return list(map(type, chain.from_iterable(map(gc.get_objects, (None,)))))


class Slope(NamedTuple):
    """A line through samples: change per unit of time, and its standard error."""

    value: float
    error: float


def slope(times: Sequence[float], values: Sequence[float]) -> Slope:
    """The least-squares line through at least three samples at even distances."""
    middle, mean = fmean(times), fmean(values)
    spread = sum((time - middle) ** 2 for time in times)
    value = sum((time - middle) * (y - mean) for time, y in zip(times, values, strict=True)) / spread
    rest = [y - mean - value * (time - middle) for time, y in zip(times, values, strict=True)]
    squares = sum(residual**2 for residual in rest)
    if squares <= 1e-12 * max(1.0, mean**2):  # Constant up to rounding.
        return Slope(value, 0.0)
    correlation = sum(a * b for a, b in pairwise(rest)) / squares
    correlation = min(max(correlation, 0.0), MOST_CORRELATED)
    error = sqrt(squares / (len(times) - 2) / spread * (1 + correlation) / (1 - correlation))
    return Slope(value, error)


@dataclass(frozen=True, slots=True)
class Trend:
    """How one measure developed. The slope is per hour, of the last two thirds of the samples."""

    first: float
    last: float
    least: float
    most: float
    slope: float
    uncertainty: float
    """Two standard errors of the slope."""
    verdict: str
    """``"no growth"``, ``"growth"``, ``"unclear"``, or ``"too short"``."""


def trend(times: Sequence[float], values: Sequence[float]) -> dict[str, Any]:
    """The ``Trend`` of samples taken at ``times`` (in seconds), as a JSON-ready dict."""
    start = len(times) // 3
    hours, late = [time / 3600 for time in times[start:]], values[start:]
    per_hour, error, verdict = 0.0, 0.0, "too short"
    if len(late) >= 6:
        per_hour, error = slope(hours, late)
        verdict = _verdict(per_hour, error)
    found = Trend(values[0], values[-1], min(values), max(values), per_hour, 2 * error, verdict)
    return asdict(found)


def _verdict(per_hour: float, error: float) -> str:
    if per_hour > GROWTH * error and per_hour > 1e-9:
        return "growth"
    return "unclear" if error and per_hour > UNCLEAR * error else "no growth"


def spark(values: Sequence[float], width: int = 60) -> str:
    """``values`` as one line of at most ``width`` bars, scaled from the least value to the greatest."""
    parts = min(width, len(values))
    means = [fmean(values[len(values) * i // parts : len(values) * (i + 1) // parts]) for i in range(parts)]
    least, most = min(means), max(means)
    if most == least:
        return BARS[0] * parts
    return "".join(BARS[min(int((mean - least) / (most - least) * len(BARS)), len(BARS) - 1)] for mean in means)
