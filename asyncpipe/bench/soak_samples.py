"""What a process holds, sampled again and again, and whether that grows: a slope with its uncertainty.

The samples of one measure follow each other closely, so that they know less than as many independent ones would: the
uncertainty of a least-squares line is widened by the correlation of its residuals. A slope is called growth from three
standard errors on, and unclear from two: then only a longer soak can tell.
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
"""What is sampled, and what it is called."""

POOLS = ("uvloop_", "asyncio_")
"""How the threads of event loops' pools are called."""
GROWTH, UNCLEAR = 3.0, 2.0
"""Standard errors from which on a slope is growth, or may be."""
MOST_CORRELATED = 0.95
BARS = "▁▂▃▄▅▆▇█"


def measure() -> dict[str, float]:
    """What this process holds at this moment, after a collection of garbage. Takes a good part of a second.

    Memory and file descriptors are read from ``/proc`` and are left out where there is none. What of the memory is in
    use is known to glibc; the rest of it is free, and kept for whoever asks next. A loop's pool gets one more thread
    where all of its threads are busy, up to a limit, and keeps it; so those are counted apart.
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
    """Bytes that the C library has given out, in all of its arenas; ``None`` if it cannot say."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def _kinds() -> list[type]:
    """The type of every object that the collector of garbage knows.

    In one call of C, in which no other thread gets its turn: ``gc.get_objects()`` finds tuples that another thread has
    not finished yet, too, and that thread fails where somebody else has a reference to its tuple.
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
    if squares <= 1e-12 * max(1.0, mean**2):  # A constant, but for the rounding of floats.
        return Slope(value, 0.0)
    correlation = sum(a * b for a, b in pairwise(rest)) / squares
    correlation = min(max(correlation, 0.0), MOST_CORRELATED)
    error = sqrt(squares / (len(times) - 2) / spread * (1 + correlation) / (1 - correlation))
    return Slope(value, error)


@dataclass(frozen=True, slots=True)
class Trend:
    """What became of one measure. The slope is that of the last two thirds, per hour, with two standard errors."""

    first: float
    last: float
    least: float
    most: float
    slope: float
    uncertainty: float
    verdict: str
    """``"no growth"``, ``"growth"``, ``"unclear"``, or ``"too short"``."""


def trend(times: Sequence[float], values: Sequence[float]) -> dict[str, Any]:
    """The ``Trend`` of samples at ``times`` in seconds, as plain data."""
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
    """``values`` as a line of bars, at most ``width`` of them, from the least to the most."""
    parts = min(width, len(values))
    means = [fmean(values[len(values) * i // parts : len(values) * (i + 1) // parts]) for i in range(parts)]
    least, most = min(means), max(means)
    if most == least:
        return BARS[0] * parts
    return "".join(BARS[min(int((mean - least) / (most - least) * len(BARS)), len(BARS) - 1)] for mean in means)
