"""The sums behind the metrics: plain numbers by metric name and label values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncpipe.observe.metrics.metric_table import HISTOGRAMS, Labels

__all__ = ["Histogram", "Totals", "bucket_of"]


def bucket_of(values: NDArray[np.float64], exponents: range) -> NDArray[np.intp]:
    """For each value the first bucket whose upper bound is not below it; the last bucket has no bound."""
    return np.searchsorted(2.0 ** np.array(exponents), values)


class Histogram:
    """Counts of values by powers of two, of which there are none at first; the last bucket has no upper bound."""

    def __init__(self, buckets: int) -> None:
        self.counts = np.zeros(buckets, np.int64)
        self.total = 0.0


class Totals:
    """Counters, gauges and histograms by name and label values (the job's left out). Not thread-safe."""

    def __init__(self) -> None:
        self.counters: dict[str, dict[Labels, float]] = {}
        self.gauges: dict[str, Mapping[Labels, float]] = {}
        self.histograms: dict[str, dict[Labels, Histogram]] = {}

    def add(self, name: str, labels: Labels, value: float) -> None:
        """Add ``value`` to a counter."""
        counter = self.counters.setdefault(name, {})
        counter[labels] = counter.get(labels, 0.0) + value

    def set(self, name: str, values: Mapping[Labels, float]) -> None:
        """Replace all values of a gauge, so that stages that a smaller step does not have are shown no longer."""
        self.gauges[name] = values

    def count(self, name: str, labels: Labels, counts: NDArray[np.int64], total: float) -> None:
        """Add values that are already counted by bucket, and their sum ``total``, to a histogram."""
        histogram = self.histograms.setdefault(name, {}).setdefault(labels, Histogram(len(counts)))
        histogram.counts += counts
        histogram.total += total

    def observe(self, name: str, labels: Labels, values: Sequence[float] | NDArray[np.float64]) -> None:
        """Count ``values`` in a histogram."""
        numbers = np.asarray(values, np.float64)
        exponents = HISTOGRAMS[name][2]
        counts = np.bincount(bucket_of(numbers, exponents), minlength=len(exponents) + 1)
        self.count(name, labels, counts, float(numbers.sum()))

    def merge(self, other: Totals) -> None:
        """Add the counters and histograms of ``other``, and take its gauges."""
        for name, counter in other.counters.items():
            for labels, value in counter.items():
                self.add(name, labels, value)
        self.gauges |= other.gauges
        for name, histograms in other.histograms.items():
            for labels, histogram in histograms.items():
                self.count(name, labels, histogram.counts, histogram.total)
