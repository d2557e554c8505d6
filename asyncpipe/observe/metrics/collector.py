"""Prometheus metrics of steps, computed when they are scraped.

The scheduler's loop turns a step's record into arrays and appends them to a queue. The thread that scrapes folds the
queue into totals::

    loop        step_completed ──▶ StepArrays(record) ──▶ queue
                       │                                   │ fold
    scraper     collect│───────────────────────────────────┴──▶ totals ──▶ copy ──▶ metric families
                       └──▶ the newest record ──▶ report ──────────────────────▲

Nothing is registered globally: add the collector to a registry of your own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from threading import Lock
from weakref import WeakKeyDictionary

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from asyncpipe import __version__
from asyncpipe.core.engine.events import Outcome
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.predict.ideal_bubble import IdealBubbles
from asyncpipe.core.predict.report import report
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.records.worker_notes import WorkerChange, WorkerState
from asyncpipe.errors import OptionError
from asyncpipe.observe.metrics.fold import add_notes, fold
from asyncpipe.observe.metrics.graph_arrays import GraphArrays
from asyncpipe.observe.metrics.metric_table import COUNTERS, GAUGES, HISTOGRAMS
from asyncpipe.observe.metrics.step_arrays import StepArrays
from asyncpipe.observe.metrics.totals import Totals

__all__ = ["FAILURES", "MergedCollector", "PipelineCollector"]

FAILURES = ("raised", "slow", "dropped", "trace", "snapshot")
"""The values of the label ``reason`` of ``asyncpipe_observer_failures_total``."""

MOST_STEPS = 4096
"""Steps that may wait for a scrape."""
MOST_TASKS = 1_000_000
"""Tasks of all steps that may wait for a scrape; a task takes 16 bytes, a copy 32."""
STACK = 16_384
"""Tasks that are folded at once: many, since each call of numpy has a fixed cost; few enough for the CPU's caches."""


class PipelineCollector(Collector):
    """An observer of the steps of one job that is also a Prometheus collector.

    Labels are job, stage, device, worker, kind, reason, src, dst and outcome. A registry accepts one such collector,
    because an exposition may name a metric only once; for several jobs use a ``MergedCollector``. All methods may be
    called from any thread.
    """

    def __init__(self, job: str = "") -> None:
        self.job = job
        self._newest: StepRecord | None = None
        """The last step that succeeded."""
        self._waiting: deque[StepArrays] = deque()
        self._arrays: WeakKeyDictionary[TaskGraph, GraphArrays] = WeakKeyDictionary()
        self._ideals = IdealBubbles()
        self._totals = Totals()
        self._lock = Lock()
        """Guards ``_totals`` and ``_arrays``; held for one stack of steps at a time."""
        for reason in FAILURES:
            self._totals.add("observer_failures", (reason,), 0)
        for outcome in ("ok", "failed"):
            self._totals.add("snapshots", (outcome,), 0)

    def step_completed(self, record: StepRecord) -> None:
        """Keep the times of ``record`` for the next scrape (0.2 µs a task), and the newest record of a success.

        If too many steps wait because nobody scrapes, the oldest ones are folded here, one stack at a time. That takes
        0.2 µs a task, and at most 3.5 ms a call.
        """
        if record.outcome is Outcome.OK:
            self._newest = record
        self._waiting.append(StepArrays(record, time.time()))
        count = len(self._waiting)
        if count > MOST_STEPS or count * len(record.graph.tasks) > MOST_TASKS:
            self._fold_oldest()

    def training_step(self, loss: float, samples: int, tokens: int, duration: float) -> None:
        """Count a training step: its loss, the data it consumed, and its seconds with optimizer and data loading."""
        with self._lock:
            self._totals.set("loss", {(): float(loss)})
            self._totals.add("samples", (), samples)
            self._totals.add("tokens", (), tokens)
            self._totals.add("training_seconds", (), duration)

    def snapshot_taken(self, seconds: float, at: float) -> None:
        """Count a snapshot that took ``seconds`` and was complete at the Unix time ``at``."""
        with self._lock:
            self._totals.add("snapshots", ("ok",), 1)
            self._totals.observe("snapshot_duration_seconds", (), [seconds])
            self._totals.set("last_snapshot_timestamp_seconds", {(): at})

    def snapshot_failed(self) -> None:
        """Count a snapshot that could not be taken."""
        with self._lock:
            self._totals.add("snapshots", ("failed",), 1)

    def worker_changed(self, change: WorkerChange) -> None:
        """Count a worker that has come up for the job, or was lost."""
        is_up = change.state is WorkerState.UP
        with self._lock:
            known = self._totals.gauges.get("worker_up", {})
            self._totals.set("worker_up", {**known, (change.worker,): is_up})
            self._totals.add("worker_losses", (change.worker,), not is_up)
            self._totals.add("worker_restarts", (change.worker,), change.is_restart)

    def observer_failed(self, reason: str) -> None:
        """Count a failure of an observer; raises ``OptionError`` unless ``reason`` is one of ``FAILURES``."""
        if reason not in FAILURES:
            raise OptionError(f"the reason must be one of {', '.join(map(repr, FAILURES))}, got {reason!r}")
        with self._lock:
            self._totals.add("observer_failures", (reason,), 1)

    def collect(self) -> Iterator[Metric]:
        """Every metric family of this job. Called by the thread that scrapes."""
        return _families([self])

    def describe(self) -> Iterator[Metric]:
        """The same families without samples, by which a registry notices a second collector."""
        return _families([])

    def drain(self) -> Totals:
        """The totals since the last call, for the ``merge`` of a collector in another process."""
        while self._fold_oldest():
            pass
        with self._lock:
            totals, self._totals = self._totals, Totals()
            self._totals.gauges = dict(totals.gauges)
        return self._with_report(totals)

    def merge(self, totals: Totals) -> None:
        """Add what ``drain`` of a collector in another process has returned."""
        with self._lock:
            self._totals.merge(totals)

    def snapshot(self) -> Totals:
        """A copy of the totals, the last step included."""
        while self._fold_oldest():
            pass
        with self._lock:
            totals = deepcopy(self._totals)
        return self._with_report(totals)

    def _with_report(self, totals: Totals) -> Totals:
        """``totals`` with the gauges that the report of the newest step gives."""
        if (record := self._newest) is not None:
            result, ideal = report(record), self._ideals.of(record.graph)
            totals.set("bubble_ratio", {(): result.bubble_ratio})
            totals.set("ideal_bubble_ratio", {} if ideal is None else {(): ideal})
            norm, memory = record.notes.gradient_norm, enumerate(result.stage_memory)
            totals.set("gradient_norm", {} if norm is None else {(): float(norm)})
            totals.set("mfu", {} if result.mfu is None else {(): result.mfu})
            totals.set("stage_memory_bytes", {(str(stage),): float(peak) for stage, peak in memory})
            if record.graph.training:
                peaks = enumerate(result.peak_in_flight)
                totals.set("inflight_microbatches", {(str(stage),): peak for stage, peak in peaks})
        return totals

    def _fold_oldest(self) -> bool:
        """Fold the oldest waiting steps, at most one stack (one step at least); returns whether there were any."""
        oldest: list[StepArrays] = []
        room = STACK
        with self._lock:
            with suppress(IndexError):
                while room > 0:
                    oldest.append(self._waiting.popleft())
                    room -= len(oldest[-1].graph.tasks)
            # The graph of the newest step comes last, since gauges show what was folded last.
            for graph in reversed(dict.fromkeys(step.graph for step in reversed(oldest))):
                arrays = self._arrays.get(graph) or self._arrays.setdefault(graph, GraphArrays(graph))
                fold(self._totals, [step for step in oldest if step.graph is graph], arrays)
            for step in oldest:
                add_notes(self._totals, step)
        return bool(oldest)


class MergedCollector(Collector):
    """One Prometheus collector for several jobs; their collectors may be added and removed from any thread."""

    def __init__(self, collectors: Iterable[PipelineCollector] = ()) -> None:
        self._collectors = tuple(collectors)
        self._lock = Lock()

    def add(self, collector: PipelineCollector) -> None:
        """Show the metrics of ``collector`` from the next scrape on. Raises ``OptionError`` if its job is there."""
        with self._lock:
            if any(other.job == collector.job for other in self._collectors):
                raise OptionError(f"there is a collector for job {collector.job!r} already; give each job its own name")
            self._collectors = (*self._collectors, collector)

    def remove(self, collector: PipelineCollector) -> None:
        """Leave ``collector`` out from the next scrape on; removing one that is not there is no error."""
        with self._lock:
            self._collectors = tuple(other for other in self._collectors if other is not collector)

    def collect(self) -> Iterator[Metric]:
        """Every metric family once, with the samples of all jobs."""
        return _families(self._collectors)

    def describe(self) -> Iterator[Metric]:
        """The same families without samples, by which a registry notices a second collector."""
        return _families([])


def _families(collectors: Sequence[PipelineCollector]) -> Iterator[Metric]:
    snapshots = [(collector.job, collector.snapshot()) for collector in collectors]
    tables = (COUNTERS, CounterMetricFamily, "counters"), (GAUGES, GaugeMetricFamily, "gauges")
    for table, family, kind in tables:
        for name, (text, labels) in table.items():
            made = family(f"asyncpipe_{name}", text, labels=("job", *labels))
            for job, totals in snapshots:
                for values, value in getattr(totals, kind).get(name, {}).items():
                    made.add_metric((job, *values), value)
            yield made
    for name, (text, labels, exponents) in HISTOGRAMS.items():
        bounds = [*(repr(2.0**exponent) for exponent in exponents), "+Inf"]
        histogram = HistogramMetricFamily(f"asyncpipe_{name}", text, labels=("job", *labels))
        for job, totals in snapshots:
            for values, counted in totals.histograms.get(name, {}).items():
                buckets = zip(bounds, counted.counts.cumsum().tolist(), strict=True)
                histogram.add_metric((job, *values), list(buckets), counted.total)
        yield histogram
    info = InfoMetricFamily("asyncpipe_build", "The version of asyncpipe that runs.", labels=("job",))
    for job, _ in snapshots:
        info.add_metric((job,), {"version": __version__})
    yield info
