"""Samples of the resources that a process holds, and a statistical test of whether they grow.

Neighbouring samples are correlated and so carry less information than independent ones: the standard error of the slope
is widened by the autocorrelation of the residuals. A slope above three standard errors is growth.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
from math import sqrt
from pathlib import Path
from statistics import fmean
from types import AsyncGeneratorType, CoroutineType
from typing import NamedTuple

from torch import Tensor

__all__ = ["POOLS", "Trend", "measure", "trend"]

POOLS = ("uvloop_", "asyncio_", "AnyIO")
"""Name prefixes of threads in the thread pools of event loops. A pool never ends a thread, up to its limit."""
GROWTH = 3.0
"""Standard errors above which a slope is growth."""
MOST_CORRELATED = 0.95
FEWEST = 6
"""Samples in the last two thirds, below which there is no verdict."""


def measure() -> dict[str, float]:
    """One sample, after a garbage collection: objects, tensors, coroutines, threads, memory in MiB, files."""
    gc.collect()
    # All in one C call, during which no other thread runs: gc.get_objects() may return a tuple that is being built.
    kinds = Counter(map(type, chain.from_iterable(map(gc.get_objects, (None,)))))
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {
        "objects": float(kinds.total()),
        "tensors": float(sum(number for kind, number in kinds.items() if issubclass(kind, Tensor))),
        "coroutines": float(kinds[CoroutineType] + kinds[AsyncGeneratorType]),
        "threads": float(sum(not thread.name.startswith(POOLS) for thread in threading.enumerate())),
        "memory (MiB)": resident * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "files": float(len(os.listdir("/proc/self/fd"))),
    }


class Trend(NamedTuple):
    """A line through the last two thirds of the samples: change per hour, and its standard error."""

    slope: float
    error: float
    verdict: str
    """``"growth"``, ``"no growth"`` or ``"too short"``."""


def trend(seconds: Sequence[float], values: Sequence[float]) -> Trend:
    """How ``values``, sampled at ``seconds``, developed: a least-squares fit to the last two thirds."""
    start = len(values) // 3
    hours, late = [second / 3600 for second in seconds[start:]], values[start:]
    if len(late) < FEWEST:
        return Trend(0.0, 0.0, "too short")
    middle, mean = fmean(hours), fmean(late)
    spread = sum((hour - middle) ** 2 for hour in hours)
    slope = sum((hour - middle) * (y - mean) for hour, y in zip(hours, late, strict=True)) / spread
    rest = [y - mean - slope * (hour - middle) for hour, y in zip(hours, late, strict=True)]
    error, squares = 0.0, sum(residual**2 for residual in rest)
    if squares > 1e-12 * max(1.0, mean**2):
        correlation = min(max(sum(a * b for a, b in pairwise(rest)) / squares, 0.0), MOST_CORRELATED)
        error = sqrt(squares / (len(late) - 2) / spread * (1 + correlation) / (1 - correlation))
    return Trend(slope, error, "growth" if slope > max(GROWTH * error, 1e-9) else "no growth")
