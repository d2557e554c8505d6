"""What a service tells Prometheus beside the steps of its jobs: how many there are, how they fare, how long they wait.

::

    Manager ── changed, waited, retried … ──▶ ServiceMetrics ◀── collect ── the thread that scrapes
    JobRun ──▶ PipelineCollector, one a job ─────▲

A job's own metrics stay for a while after its run, so that a scrape finds its last steps, and go on counting if it runs
again. Nothing is registered globally.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from math import inf
from threading import Lock

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from asyncpipe.observe.metrics import MergedCollector, PipelineCollector
from asyncpipe.observe.metrics.totals import bucket_of
from asyncpipe.service.job_states import JobRecord, JobState

__all__ = ["ServiceMetrics"]

WAITING = range(-4, 21)
"""Exponents of two that bound the waiting times: from 1/16 s to 12 days."""
MOST_ENDED = 16
"""Jobs whose metrics stay when they do not run any more."""
ID_END = 6
"""Characters of a job's id that tell it from others of its name."""


class ServiceMetrics(Collector):
    """Counts what happens to a service's jobs, and is a collector for a registry. Any thread may call any method."""

    def __init__(self) -> None:
        self.is_ready: Callable[[], bool] = lambda: False
        """Asked at each scrape, as the next two are."""
        self.commits: Callable[[], int] = lambda: 0
        self.hung_tasks: Callable[[], int] = lambda: 0
        self._merged = MergedCollector()
        self._collectors: dict[str, PipelineCollector] = {}
        """By job; the one that ended last comes last."""
        self._running: set[str] = set()
        self._jobs: Counter[str] = Counter(dict.fromkeys(JobState, 0))
        self._transitions: Counter[str] = Counter(dict.fromkeys(JobState, 0))
        self._retries: Counter[str] = Counter(step=0, snapshot=0)
        self._log_failures = 0
        self._waited = [0] * (len(WAITING) + 1)
        self._waited_seconds = 0.0
        self._lock = Lock()

    # What happens

    def there_are(self, jobs: Mapping[JobState, int]) -> None:
        """The store holds so many jobs in each state."""
        with self._lock:
            self._jobs = Counter({state: jobs.get(state, 0) for state in JobState})

    def changed(self, before: JobState | None, after: JobState) -> None:
        """A job became ``after``; ``None`` before its submission."""
        with self._lock:
            if before is not None:
                self._jobs[before] -= 1
            self._jobs[after] += 1
            self._transitions[after] += 1

    def waited(self, seconds: float) -> None:
        """A job began that had been in the queue so long."""
        with self._lock:
            self._waited[int(bucket_of(np.array([max(seconds, 0.0)]), WAITING)[0])] += 1
            self._waited_seconds += max(seconds, 0.0)

    def retried(self, how: str) -> None:
        """A ``"step"`` was tried again, or a job went back to its last ``"snapshot"``."""
        with self._lock:
            self._retries[how] += 1

    def log_failed(self) -> None:
        """A job's log could not be written."""
        with self._lock:
            self._log_failures += 1

    # Jobs' own metrics

    def collector_of(self, record: JobRecord) -> PipelineCollector:
        """The collector of a job that begins to run: that of its last run, if it is still there.

        Its label is the job's name, with the end of its id where another job has that name.
        """
        with self._lock:
            collector = self._collectors.pop(record.id, None)
            if collector is None:
                taken = {other.job for other in self._collectors.values()}
                name = record.spec.name
                collector = PipelineCollector(name if name not in taken else _distinct(name, record.id, taken))
                self._merged.add(collector)
            self._collectors[record.id] = collector
            self._running.add(record.id)
            return collector

    def ended(self, job: str) -> None:
        """A run of ``job`` is over; its metrics stay until some other runs have ended."""
        with self._lock:
            self._running.discard(job)
            collector = self._collectors.pop(job, None)
            if collector is None:
                return
            self._collectors[job] = collector
            old = [other for other in self._collectors if other not in self._running][:-MOST_ENDED]
            for other in old:
                self._merged.remove(self._collectors.pop(other))

    # Prometheus

    def collect(self) -> Iterator[Metric]:
        """Every metric family of the service and of its jobs. Called by the thread that scrapes."""
        yield from self._families()
        yield from self._merged.collect()

    def describe(self) -> Iterator[Metric]:
        """The same families; those of the jobs without samples."""
        yield from self._families()
        yield from self._merged.describe()

    def _families(self) -> Iterator[Metric]:
        ready, commits, hung = self.is_ready(), self.commits(), self.hung_tasks()
        with self._lock:
            jobs, transitions, retries = dict(self._jobs), dict(self._transitions), dict(self._retries)
            waited, seconds, log_failures = list(self._waited), self._waited_seconds, self._log_failures
            running = {each.job: job in self._running for job, each in self._collectors.items()}
        yield _labelled(GaugeMetricFamily, "asyncpipe_jobs", "Jobs by their state.", "state", jobs)
        text = "Whether a job runs whose metrics are here: 1, or 0 after its run."
        yield _labelled(GaugeMetricFamily, "asyncpipe_job_running", text, "job", running)
        yield _labelled(
            CounterMetricFamily,
            "asyncpipe_job_transitions",
            "Transitions of jobs since the service started, by the state that they led to.",
            "to",
            transitions,
        )
        yield _labelled(
            CounterMetricFamily,
            "asyncpipe_job_retries",
            "Failures that were tried again: a step on the same batch, or a job from its last snapshot.",
            "how",
            retries,
        )
        text = "Seconds that jobs waited in the queue before they began, each time."
        yield HistogramMetricFamily("asyncpipe_job_queue_seconds", text, buckets=_buckets(waited), sum_value=seconds)
        text = "Whether the service takes new jobs: 1 or 0."
        yield GaugeMetricFamily("asyncpipe_service_ready", text, value=float(ready))
        text = "Transactions of the job store since the service started."
        yield CounterMetricFamily("asyncpipe_store_commits", text, value=commits)
        text = "Tasks that ran so much longer than before that their steps were failed."
        yield CounterMetricFamily("asyncpipe_hung_tasks", text, value=hung)
        text = "Times that the files of a job's log could not be written."
        yield CounterMetricFamily("asyncpipe_job_log_failures", text, value=log_failures)


def _labelled(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    family = kind(name, text, labels=(label,))
    for key, value in values.items():
        family.add_metric((str(key),), value)
    return family


def _buckets(counts: list[int]) -> list[tuple[str, float]]:
    found = []
    total = 0
    for bound, count in zip([*(2.0**exponent for exponent in WAITING), inf], counts, strict=True):
        total += count
        found.append(("+Inf" if bound == inf else repr(bound), float(total)))
    return found


def _distinct(name: str, job: str, taken: set[str]) -> str:
    """``name`` with as much of the id's end as makes it another one than those that are ``taken``."""
    ends = (f"{name}-{job[-length:]}" for length in range(ID_END, len(job)))
    return next((end for end in ends if end not in taken), f"{name}-{job}")
