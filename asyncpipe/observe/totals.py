"""What the metrics add up to: a table of their names, and plain numbers by name and label values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import frexp, inf

__all__ = ["COUNTERS", "GAUGES", "HISTOGRAMS", "Histogram", "Totals"]

Labels = tuple[str, ...]

COUNTERS: dict[str, tuple[str, Labels]] = {
    "steps": ("Steps by outcome (ok, failed, cancelled); a pipe(x) and its backward count as one each.", ("outcome",)),
    "tasks": ("Tasks by kind (F, R, B, C ...) and outcome (completed, failed, dropped).", ("kind", "outcome")),
    "stage_busy_seconds": ("Seconds that a device computed for a stage.", ("stage", "device")),
    "stage_idle_seconds": (
        "Seconds inside steps that a device stood idle before a task of a stage, by reason: dependency (not yet "
        "computed elsewhere), copy (on its way), dispatch (there, but not begun), drain (after its last task).",
        ("stage", "device", "reason"),
    ),
    "samples": ("Training samples consumed.", ()),
    "tokens": ("Training tokens consumed.", ()),
    "training_seconds": ("Seconds of training steps, optimizer and data included.", ()),
}
GAUGES: dict[str, tuple[str, Labels]] = {
    "inflight_microbatches": (
        "Most micro-batches between forward and backward at a stage in the last step.",
        ("stage",),
    ),
    "bubble_ratio": ("Idle share of the compute lanes in the last step, from 0 to 1.", ()),
    "loss": ("Loss of the last training step.", ()),
    "last_step_timestamp_seconds": ("Unix time at which the last step ended.", ()),
}
HISTOGRAMS: dict[str, tuple[str, Labels, range]] = {
    "step_duration_seconds": ("Seconds from the submission of a step to the end of its last task.", (), range(-10, 11)),
    "task_duration_seconds": ("Seconds that tasks ran.", ("stage", "kind"), range(-17, 5)),
    "task_queue_seconds": ("Seconds between a task's dispatch and its start.", ("device",), range(-17, 3)),
}
"""Help, labels besides the job, and the exponents of two that bound the buckets (2**-17 s is 7.6 µs)."""


@dataclass(slots=True)
class Histogram:
    """Counts of values by powers of two; the last bucket has no upper bound."""

    exponents: range
    counts: list[int]
    total: float = 0.0

    def observe(self, value: float) -> None:
        """Count ``value`` in the first bucket whose bound is not below it."""
        mantissa, exponent = frexp(value)
        # frexp gives value = mantissa * 2**exponent with 0.5 <= mantissa < 1: a power of two has mantissa 0.5
        # and belongs to the bucket that it bounds.
        place = exponent - (mantissa <= 0.5) - self.exponents[0] if value > 0 else 0
        self.counts[min(max(place, 0), len(self.exponents))] += 1
        self.total += value

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper bound, values not above it) for every bucket, the last with the bound infinity."""
        bounds = [*(2.0**exponent for exponent in self.exponents), inf]
        return list(zip(bounds, accumulate(self.counts), strict=True))

    def copy(self) -> Histogram:
        """An independent histogram with the same counts."""
        return Histogram(self.exponents, self.counts.copy(), self.total)


class Totals:
    """Counters, gauges and histograms by name and label values (the job's left out). Not thread-safe."""

    def __init__(self, at: float = -inf) -> None:
        self.at = at
        """The time of the step that the gauges tell about."""
        self.counters: dict[str, dict[Labels, float]] = {}
        self.gauges: dict[str, dict[Labels, float]] = {}
        self.histograms: dict[str, dict[Labels, Histogram]] = {}

    def add(self, name: str, labels: Labels, value: float) -> None:
        """Raise a counter by ``value``."""
        counter = self.counters.setdefault(name, {})
        counter[labels] = counter.get(labels, 0.0) + value

    def set(self, name: str, labels: Labels, value: float) -> None:
        """Set a gauge to ``value``."""
        self.gauges.setdefault(name, {})[labels] = value

    def observe(self, name: str, labels: Labels, values: Iterable[float]) -> None:
        """Count ``values`` in a histogram."""
        histogram = self._histogram(name, labels)
        for value in values:
            histogram.observe(value)

    def merge(self, change: Totals) -> None:
        """Take ``change`` in; its gauges only if they are not older, since two threads may fold at a time."""
        for name, counter in change.counters.items():
            for labels, value in counter.items():
                self.add(name, labels, value)
        if change.at >= self.at:
            self.at = change.at
            for name, gauge in change.gauges.items():
                # A whole gauge at a time: a step with fewer stages leaves no stale ones behind.
                self.gauges[name] = dict(gauge)
        for name, histograms in change.histograms.items():
            for labels, histogram in histograms.items():
                mine = self._histogram(name, labels)
                mine.counts = [a + b for a, b in zip(mine.counts, histogram.counts, strict=True)]
                mine.total += histogram.total

    def copy(self) -> Totals:
        """Independent totals with the same numbers."""
        same = Totals(self.at)
        same.counters = {name: dict(counter) for name, counter in self.counters.items()}
        same.gauges = {name: dict(gauge) for name, gauge in self.gauges.items()}
        same.histograms = {
            name: {labels: histogram.copy() for labels, histogram in histograms.items()}
            for name, histograms in self.histograms.items()
        }
        return same

    def _histogram(self, name: str, labels: Labels) -> Histogram:
        histograms = self.histograms.setdefault(name, {})
        found = histograms.get(labels)
        if found is None:
            exponents = HISTOGRAMS[name][2]
            found = histograms[labels] = Histogram(exponents, [0] * (len(exponents) + 1))
        return found
