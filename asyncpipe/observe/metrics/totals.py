"""The sums behind the metrics: plain numbers by metric name and label values."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from asyncpipe.observe.metrics.metric_table import HISTOGRAMS, Labels

__all__ = ["Histogram", "Totals", "bucket_of"]


def bucket_of(values: NDArray[np.float64], exponents: range) -> NDArray[np.intp]:
    """For each value the first bucket whose upper bound is not below it; the last bucket has no bound."""
    return np.searchsorted(2.0 ** np.array(exponents), values)


class Histogram:
    """Counts of values by powers of two, of which there are none at first; the last bucket has no upper bound."""

    def __init__(self, exponents: range) -> None:
        self.exponents = exponents
        self.counts = np.zeros(len(exponents) + 1, np.int64)
        self.total = 0.0

    def add(self, counts: NDArray[np.int64], total: float) -> None:
        """Add values that are already counted by bucket, and their sum ``total``."""
        self.counts += counts
        self.total += total

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper bound, values not above it) for every bucket, the last with the bound infinity."""
        bounds = [*(2.0**exponent for exponent in self.exponents), inf]
        return list(zip(bounds, self.counts.cumsum().tolist(), strict=True))


class Totals:
    """Counters, gauges and histograms by name and label values (the job's left out). Not thread-safe."""

    def __init__(self) -> None:
        self.counters: dict[str, dict[Labels, float]] = {}
        self.gauges: dict[str, tuple[float, dict[Labels, float]]] = {}
        """(the time at which the values were current, the values)"""
        self.histograms: dict[str, dict[Labels, Histogram]] = {}

    def add(self, name: str, labels: Labels, value: float) -> None:
        """Add ``value`` to a counter."""
        counter = self.counters.setdefault(name, {})
        counter[labels] = counter.get(labels, 0.0) + value

    def set(self, name: str, values: dict[Labels, float], at: float) -> None:
        """Replace all values of a gauge by those of the time ``at``, unless it has newer ones.

        Replacing all of them removes the series of stages that a smaller step does not have.
        """
        if name not in self.gauges or self.gauges[name][0] <= at:
            self.gauges[name] = (at, values)

    def count(self, name: str, labels: Labels, counts: NDArray[np.int64], total: float) -> None:
        """Add values that are already counted by bucket, and their sum ``total``, to a histogram."""
        histograms = self.histograms.setdefault(name, {})
        if labels not in histograms:
            histograms[labels] = Histogram(HISTOGRAMS[name][2])
        histograms[labels].add(counts, total)

    def observe(self, name: str, labels: Labels, values: Sequence[float] | NDArray[np.float64]) -> None:
        """Count ``values`` in a histogram."""
        numbers = np.asarray(values, np.float64)
        exponents = HISTOGRAMS[name][2]
        counts = np.bincount(bucket_of(numbers, exponents), minlength=len(exponents) + 1)
        self.count(name, labels, counts, float(numbers.sum()))

    def merge(self, change: Totals) -> None:
        """Add ``change``. Gauges that are older than the present ones are ignored: two threads may fold at a time."""
        for name, counter in change.counters.items():
            for labels, value in counter.items():
                self.add(name, labels, value)
        for name, (at, values) in change.gauges.items():
            self.set(name, dict(values), at)
        for name, histograms in change.histograms.items():
            for labels, histogram in histograms.items():
                self.count(name, labels, histogram.counts, histogram.total)

    def copy(self) -> Totals:
        """Independent totals with the same numbers."""
        same = Totals()
        same.merge(self)
        return same
