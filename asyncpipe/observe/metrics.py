"""Prometheus metrics of steps, folded when they are scraped.

The scheduler's loop only appends a record to a queue; the thread that scrapes folds what has gathered::

    loop        step_completed ──▶ [record, record, …]
                                        │ fold, without a lock
    scraper     collect ────────────────┴──▶ totals ──▶ copy ──▶ families
                                              └── under the lock ──┘

Nothing is registered globally: give the collector to a registry of your own.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
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

from asyncpipe.core.events import Dispatch, Outcome, StepRecord, TaskCompleted, TaskDropped, TaskFailed
from asyncpipe.core.report import Report, report
from asyncpipe.core.task import TaskKind
from asyncpipe.errors import OptionError
from asyncpipe.observe.idle import usage
from asyncpipe.observe.totals import COUNTERS, GAUGES, HISTOGRAMS, Histogram, Totals

__all__ = ["MergedCollector", "MetricsServer", "PipelineCollector", "serve_metrics"]

MOST_RECORDS = 256
"""Records that may wait for a scrape; a record holds its whole journal."""
MOST_EVENTS = 200_000
"""Journal entries that may wait, so that huge graphs do not pile up 256 deep (an entry is about 150 bytes)."""

_TASK_OUTCOMES = {TaskCompleted: "completed", TaskFailed: "failed", TaskDropped: "dropped"}


class PipelineCollector(Collector):
    """Is told of the steps of one job, as an observer, and tells Prometheus, as a collector.

    Labels are job, stage, device, kind, reason and outcome. A registry takes one of these; for several jobs
    put them into a ``MergedCollector``, since an exposition may name a metric only once.
    """

    def __init__(self, job: str = "") -> None:
        self.job = job
        self._waiting: deque[tuple[StepRecord, float]] = deque()
        self._totals = Totals()
        self._lock = Lock()
        """Guards ``_totals``; nothing is folded or built while it is held."""

    def step_completed(self, record: StepRecord) -> None:
        """Keep ``record`` for the next scrape (0.2 µs); fold the oldest where too many wait."""
        self._waiting.append((record, time.time()))
        count = len(self._waiting)
        if record.outcome is not Outcome.OK:
            # The error's traceback holds the frames, and so the tensors, of the failed step: let go of it now.
            self._fold_waiting()
        elif count > MOST_RECORDS or count * len(record.journal) > MOST_EVENTS:
            self._fold_oldest()

    def training_step(self, loss: float, samples: int, tokens: int, duration: float) -> None:
        """Count one training step: its loss, what it consumed, and its seconds, optimizer and data included."""
        with self._lock:
            self._totals.set("loss", (), float(loss))
            self._totals.add("samples", (), samples)
            self._totals.add("tokens", (), tokens)
            self._totals.add("training_seconds", (), duration)

    def collect(self) -> Iterator[Metric]:
        """Every metric family of this job. Called by the thread that scrapes."""
        return _families([self])

    def describe(self) -> Iterator[Metric]:
        """The same families without samples, by which a registry notices a second collector."""
        return _families([])

    def snapshot(self) -> Totals:
        """A copy of all totals up to the last step."""
        self._fold_waiting()
        with self._lock:
            return self._totals.copy()

    def _fold_waiting(self) -> None:
        while self._fold_oldest():
            pass

    def _fold_oldest(self) -> bool:
        try:
            record, at = self._waiting.popleft()
        except IndexError:
            return False
        change = _fold(record, at)
        with self._lock:
            self._totals.merge(change)
        return True


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


def _fold(record: StepRecord, at: float) -> Totals:
    """What one step adds to the totals; ``at`` is the Unix time of its end."""
    change = Totals(at)
    result = report(record)
    change.add("steps", (record.outcome.value,), 1)
    change.set("last_step_timestamp_seconds", (), at)
    _fold_tasks(change, record)
    _fold_usage(change, record, result)
    if record.outcome is Outcome.OK:
        change.observe("step_duration_seconds", (), [result.seconds])
        change.set("bubble_ratio", (), result.bubble_ratio)
        # Without backwards nothing keeps a micro-batch at a stage.
        for stage, peak in enumerate(result.peak_in_flight if record.graph.training else ()):
            change.set("inflight_microbatches", (str(stage),), peak)
    return change


def _fold_tasks(change: Totals, record: StepRecord) -> None:
    """Counts, durations and queueing times of tasks; gathered first, so that labels are made once a series."""
    tasks = record.graph.tasks
    dispatched: dict[int, float] = {}
    counts: Counter[tuple[TaskKind, str]] = Counter()
    durations: dict[tuple[int, TaskKind], list[float]] = defaultdict(list)
    queued: dict[int, list[float]] = defaultdict(list)
    for at, event in record.journal:
        if isinstance(event, Dispatch):
            dispatched[event.task] = at
        elif isinstance(event, (TaskCompleted, TaskFailed, TaskDropped)):
            task = tasks[event.task]
            counts[task.kind, _TASK_OUTCOMES[type(event)]] += 1
            if isinstance(event, TaskCompleted):
                durations[task.stage, task.kind].append(event.ended - event.started)
                # The clocks of a device and of the loop may differ a little.
                waited = event.started - dispatched.get(event.task, event.started)
                queued[record.graph.lane_of[event.task]].append(max(waited, 0.0))
    for (kind, outcome), count in counts.items():
        change.add("tasks", (kind.value, outcome), count)
    for (stage, kind), values in durations.items():
        change.observe("task_duration_seconds", (str(stage), kind.value), values)
    for lane, values in queued.items():
        change.observe("task_queue_seconds", (record.graph.lanes[lane].device,), values)


def _fold_usage(change: Totals, record: StepRecord, result: Report) -> None:
    used = usage(result, record.graph)
    for (stage, device), seconds in used.busy.items():
        change.add("stage_busy_seconds", (str(stage), device), seconds)
    for (stage, device, reason), seconds in used.idle.items():
        change.add("stage_idle_seconds", (str(stage), device, reason.value), seconds)


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
            for values, value in totals.gauges.get(name, {}).items():
                gauge.add_metric((job, *values), value)
        yield gauge
    for name, (text, labels, _) in HISTOGRAMS.items():
        histogram = HistogramMetricFamily(f"asyncpipe_{name}", text, labels=("job", *labels))
        for job, totals in snapshots:
            for values, found in totals.histograms.get(name, {}).items():
                histogram.add_metric((job, *values), _buckets(found), found.total)
        yield histogram
    yield InfoMetricFamily("asyncpipe_build", "The version of asyncpipe that runs.", {"version": _version()})


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Upper bounds and cumulative counts, as the exposition has them."""
    return [("+Inf" if bound == inf else repr(bound), count) for bound, count in histogram.cumulative()]


def _version() -> str:
    try:
        return metadata.version("asyncpipe")
    except metadata.PackageNotFoundError:
        return "unknown"
