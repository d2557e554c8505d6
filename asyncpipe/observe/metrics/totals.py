"""What the metrics add up to: a table of their names, and plain numbers by name and label values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

__all__ = ["COUNTERS", "GAUGES", "HISTOGRAMS", "Histogram", "Totals", "bucket_of"]

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
    "executor_busy_seconds": (
        "Seconds that a device's host thread spent on tasks: running them on a CPU, queueing them on CUDA.",
        ("device",),
    ),
    "copy_bytes": (
        "Bytes brought from one logical device to another; between CPU devices they are handed over, not moved.",
        ("src", "dst"),
    ),
    "copy_seconds": ("Seconds that copies from one logical device to another took.", ("src", "dst")),
    "samples": ("Training samples consumed.", ()),
    "tokens": ("Training tokens consumed.", ()),
    "training_seconds": ("Seconds of training steps, optimizer and data included.", ()),
    "observer_failures": (
        "Observers that raised or were slow, and what was lost: records dropped, a trace or a snapshot not written.",
        ("reason",),
    ),
    "snapshots": ("Snapshots by outcome (ok, failed).", ("outcome",)),
}
GAUGES: dict[str, tuple[str, Labels]] = {
    "ready_tasks": (
        "Mean number of tasks, over the last step, that had everything they wait for in the task graph and had not "
        "begun on their device.",
        ("device",),
    ),
    "inflight_microbatches": (
        "Most micro-batches between forward and backward at a stage in the last step.",
        ("stage",),
    ),
    "bubble_ratio": ("Idle share of the compute lanes in the last step, from 0 to 1.", ()),
    "ideal_bubble_ratio": (
        "Bubble of the last step's task graph where all stages cost the same and copies nothing (F, R, I and W one "
        "unit each, B two); left out for graphs of more than 50000 tasks.",
        (),
    ),
    "loss": ("Loss of the last training step.", ()),
    "memory_allocated_bytes": ("Bytes of a physical device in use by this process after the last step.", ("device",)),
    "memory_peak_bytes": ("Most bytes of a physical device that this process ever used.", ("device",)),
    "memory_limit_bytes": ("Bytes of a physical device that there are to use.", ("device",)),
    "last_step_timestamp_seconds": ("Unix time at which the last step ended.", ()),
    "last_snapshot_timestamp_seconds": ("Unix time at which the last snapshot was taken.", ()),
}
HISTOGRAMS: dict[str, tuple[str, Labels, range]] = {
    "step_duration_seconds": ("Seconds from the submission of a step to the end of its last task.", (), range(-10, 11)),
    "task_duration_seconds": ("Seconds that tasks ran.", ("stage", "kind"), range(-17, 5)),
    "task_queue_seconds": (
        "Seconds from the moment a task had everything it waits for in the task graph to its start.",
        ("device",),
        range(-17, 3),
    ),
    "scheduler_loop_lag_seconds": ("Seconds by which the event loop ran a scheduler wake-up late.", (), range(-20, 3)),
    "scheduler_dispatch_seconds": ("Seconds that the scheduler took in a wake-up.", (), range(-20, 3)),
    "snapshot_duration_seconds": ("Seconds that snapshots took.", (), range(-7, 11)),
}
"""Help, labels besides the job, and the exponents of two that bound the buckets (2**-17 s is 7.6 µs)."""


def bucket_of(values: NDArray[np.float64], exponents: range) -> NDArray[np.intp]:
    """For each value the first bucket whose bound is not below it; the last bucket has no bound."""
    # frexp gives value = mantissa * 2**exponent with 0.5 <= mantissa < 1: a power of two has mantissa 0.5 and belongs
    # to the bucket that it bounds. What is below the first bound, 0 included, is in the first bucket.
    mantissas, places = np.frexp(np.maximum(values, 2.0 ** exponents[0]))
    buckets: NDArray[np.intp] = np.minimum(places - (mantissas == 0.5) - exponents[0], len(exponents)).astype(np.intp)
    return buckets


@dataclass(slots=True, eq=False)
class Histogram:
    """Counts of values by powers of two; the last bucket has no upper bound."""

    exponents: range
    counts: NDArray[np.int64]
    total: float = 0.0

    @classmethod
    def empty(cls, exponents: range) -> Histogram:
        """A histogram without values."""
        return cls(exponents, np.zeros(len(exponents) + 1, np.int64))

    def add(self, counts: NDArray[np.int64], total: float) -> None:
        """Take in values that were counted elsewhere, by bucket, and their sum."""
        self.counts += counts
        self.total += total

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper bound, values not above it) for every bucket, the last with the bound infinity."""
        bounds = [*(2.0**exponent for exponent in self.exponents), inf]
        return list(zip(bounds, self.counts.cumsum().tolist(), strict=True))

    def copy(self) -> Histogram:
        """An independent histogram with the same counts."""
        return Histogram(self.exponents, self.counts.copy(), self.total)


class Totals:
    """Counters, gauges and histograms by name and label values (the job's left out). Not thread-safe."""

    def __init__(self) -> None:
        self.counters: dict[str, dict[Labels, float]] = {}
        self.gauges: dict[str, tuple[float, dict[Labels, float]]] = {}
        """With the time that they tell about."""
        self.histograms: dict[str, dict[Labels, Histogram]] = {}

    def add(self, name: str, labels: Labels, value: float) -> None:
        """Raise a counter by ``value``."""
        counter = self.counters.setdefault(name, {})
        counter[labels] = counter.get(labels, 0.0) + value

    def set(self, name: str, values: dict[Labels, float], at: float) -> None:
        """Set all of a gauge to what it was at the time ``at``, unless it tells of a later one.

        A whole gauge at a time: a step with fewer stages leaves no stale ones behind.
        """
        if name not in self.gauges or self.gauges[name][0] <= at:
            self.gauges[name] = (at, values)

    def count(self, name: str, labels: Labels, counts: NDArray[np.int64], total: float) -> None:
        """Take values into a histogram that are counted by bucket, and their sum."""
        histograms = self.histograms.setdefault(name, {})
        if labels not in histograms:
            histograms[labels] = Histogram.empty(HISTOGRAMS[name][2])
        histograms[labels].add(counts, total)

    def observe(self, name: str, labels: Labels, values: Sequence[float] | NDArray[np.float64]) -> None:
        """Count ``values`` in a histogram."""
        numbers = np.asarray(values, np.float64)
        exponents = HISTOGRAMS[name][2]
        counts = np.bincount(bucket_of(numbers, exponents), minlength=len(exponents) + 1)
        self.count(name, labels, counts, float(numbers.sum()))

    def merge(self, change: Totals) -> None:
        """Take ``change`` in; a gauge only if it is not older, since two threads may fold at a time."""
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
