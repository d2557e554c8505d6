"""Prometheus metrics of steps, folded when they are scraped.

The scheduler's loop packs a record's times into arrays and appends them to a queue; the thread that scrapes folds what
has gathered::

    loop        step_completed ── pack ──▶ [packed, packed, …]
                                                  │ fold, without a lock
    scraper     collect ──────────────────────────┴──▶ totals ──▶ copy ──▶ families
                                                        └── under the lock ──┘

Nothing is registered globally: give the collector to a registry of your own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import metadata
from math import inf
from threading import Lock

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from asyncpipe.core.engine.events import StepRecord
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.errors import OptionError
from asyncpipe.observe.metrics.fold import fold
from asyncpipe.observe.metrics.pack import PackedStep, pack
from asyncpipe.observe.metrics.plan import Plans
from asyncpipe.observe.metrics.totals import COUNTERS, GAUGES, HISTOGRAMS, Histogram, Totals

__all__ = ["FAILURES", "MergedCollector", "MetricsServer", "PipelineCollector", "serve_metrics"]

FAILURES = ("raised", "slow", "dropped", "trace", "snapshot")
"""What may go wrong with observers, as ``asyncpipe_observer_failures_total`` tells it apart."""

MOST_STEPS = 4096
"""Packed steps that may wait for a scrape."""
MOST_TASKS = 1_000_000
"""Tasks of packed steps that may wait, so that huge graphs do not pile up (a task is 16 bytes, a copy 32)."""
STACK = 16_384
"""Tasks that are folded at a time: enough to make numpy's price per call small, and few enough for the caches."""


class PipelineCollector(Collector):
    """Is told of the steps of one job, as an observer, and tells Prometheus, as a collector.

    Labels are job, stage, device, kind, reason, src, dst and outcome. A registry takes one of these; for several jobs
    put them into a ``MergedCollector``, since an exposition may name a metric only once. What a step tells may come
    from any thread.
    """

    def __init__(self, job: str = "") -> None:
        self.job = job
        self._waiting: deque[PackedStep] = deque()
        self._plans = Plans()
        self._totals = Totals()
        self._lock = Lock()
        """Guards ``_totals``; nothing is folded or built while it is held."""
        for reason in FAILURES:
            self._totals.add("observer_failures", (reason,), 0)
        for outcome in ("ok", "failed"):
            self._totals.add("snapshots", (outcome,), 0)

    def step_completed(self, record: StepRecord) -> None:
        """Keep what ``record`` tells for the next scrape (0.2 µs per task); nothing of its journal stays alive.

        Where too many steps wait because nobody scrapes, the oldest are folded here, a stack at a time: 0.15 µs per
        task, and 2.5 ms at once.
        """
        self._waiting.append(pack(record, time.time()))
        count = len(self._waiting)
        if count > MOST_STEPS or count * len(record.graph.tasks) > MOST_TASKS:
            self._fold_oldest(scraping=False)

    def training_step(self, loss: float, samples: int, tokens: int, duration: float) -> None:
        """Count one training step: its loss, what it consumed, and its seconds, optimizer and data included."""
        with self._lock:
            self._totals.set("loss", {(): float(loss)}, time.time())
            self._totals.add("samples", (), samples)
            self._totals.add("tokens", (), tokens)
            self._totals.add("training_seconds", (), duration)

    def snapshot_taken(self, seconds: float, at: float) -> None:
        """Count a snapshot that took ``seconds`` and was there at the Unix time ``at``."""
        with self._lock:
            self._totals.add("snapshots", ("ok",), 1)
            self._totals.observe("snapshot_duration_seconds", (), [seconds])
            self._totals.set("last_snapshot_timestamp_seconds", {(): at}, at)

    def snapshot_failed(self) -> None:
        """Count a snapshot that could not be taken."""
        with self._lock:
            self._totals.add("snapshots", ("failed",), 1)

    def observer_failed(self, reason: str) -> None:
        """Count what went wrong with an observer; raises ``OptionError`` unless ``reason`` is one of ``FAILURES``."""
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

    def snapshot(self) -> Totals:
        """A copy of all totals up to the last step."""
        while self._fold_oldest(scraping=True):
            pass
        with self._lock:
            return self._totals.copy()

    def _fold_oldest(self, *, scraping: bool) -> bool:
        """Fold a stack of the steps that wait, or fewer if there are no more; says whether there was any."""
        by_graph = self._take(STACK)
        for graph, steps in by_graph.items():
            change = fold(steps, self._plans.of(graph))
            if "bubble_ratio" in change.gauges:
                ideal = self._plans.ideal_bubble(graph, make=scraping)
                change.set("ideal_bubble_ratio", {} if ideal is None else {(): ideal}, change.gauges["bubble_ratio"][0])
            with self._lock:
                self._totals.merge(change)
        return bool(by_graph)

    def _take(self, most: int) -> dict[TaskGraph, list[PackedStep]]:
        """The oldest steps that wait, of ``most`` tasks together (one step at least), by graph."""
        found: dict[TaskGraph, list[PackedStep]] = {}
        while most > 0:
            try:
                step = self._waiting.popleft()
            except IndexError:
                break
            found.setdefault(step.graph, []).append(step)
            most -= len(step.graph.tasks)
        return found


class MergedCollector(Collector):
    """Tells Prometheus of several jobs at once; add and remove their collectors at any time, from any thread."""

    def __init__(self, collectors: Iterable[PipelineCollector] = ()) -> None:
        self._collectors = tuple(collectors)
        self._lock = Lock()

    def add(self, collector: PipelineCollector) -> None:
        """Show the metrics of ``collector`` from the next scrape on. Its job's name must be free."""
        with self._lock:
            if any(other.job == collector.job for other in self._collectors):
                raise OptionError(f"there is a collector for job {collector.job!r} already; give each job its own name")
            self._collectors = (*self._collectors, collector)

    def remove(self, collector: PipelineCollector) -> None:
        """Leave ``collector`` out from the next scrape on; one that is not there is no error."""
        with self._lock:
            self._collectors = tuple(other for other in self._collectors if other is not collector)

    def collect(self) -> Iterator[Metric]:
        """Every metric family once, with the samples of all jobs."""
        return _families(self._collectors)

    def describe(self) -> Iterator[Metric]:
        """The same families without samples, by which a registry notices a second collector."""
        return _families([])


class MetricsServer:
    """A running HTTP server for ``/metrics``; leaving its ``with`` block closes it."""

    def __init__(self, registry: CollectorRegistry, port: int, address: str) -> None:
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except OSError as error:
            raise OptionError(f"cannot serve metrics on {address}:{port}: {error}") from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving, free the port and join the thread; may be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_metrics(registry: CollectorRegistry, port: int, address: str = "127.0.0.1") -> MetricsServer:
    """A server that answers scrapes of ``registry`` from threads of its own; port 0 takes a free one (``.port``)."""
    return MetricsServer(registry, port, address)


def _families(collectors: Sequence[PipelineCollector]) -> Iterator[Metric]:
    snapshots = [(collector.job, collector.snapshot()) for collector in collectors]
    for name, (text, labels) in COUNTERS.items():
        counter = CounterMetricFamily(f"asyncpipe_{name}", text, labels=("job", *labels))
        for job, totals in snapshots:
            for values, value in totals.counters.get(name, {}).items():
                counter.add_metric((job, *values), value)
        yield counter
    for name, (text, labels) in GAUGES.items():
        gauge = GaugeMetricFamily(f"asyncpipe_{name}", text, labels=("job", *labels))
        for job, totals in snapshots:
            _, found = totals.gauges.get(name, (0.0, {}))
            for values, value in found.items():
                gauge.add_metric((job, *values), value)
        yield gauge
    for name, (text, labels, _) in HISTOGRAMS.items():
        histogram = HistogramMetricFamily(f"asyncpipe_{name}", text, labels=("job", *labels))
        for job, totals in snapshots:
            for values, counted in totals.histograms.get(name, {}).items():
                histogram.add_metric((job, *values), _buckets(counted), counted.total)
        yield histogram
    info = InfoMetricFamily("asyncpipe_build", "The version of asyncpipe that runs.", labels=("job",))
    for job, _ in snapshots:
        info.add_metric((job,), {"version": _version()})
    yield info


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Upper bounds and cumulative counts, as the exposition has them."""
    return [("+Inf" if bound == inf else repr(bound), count) for bound, count in histogram.cumulative()]


@cache
def _version() -> str:
    try:
        return metadata.version("asyncpipe")
    except metadata.PackageNotFoundError:
        return "unknown"
