"""The Prometheus metrics of a service: numbers of jobs, their transitions, retries and waiting times.

::

    Manager ── changed, waited, retried … ──▶ ServiceMetrics ◀── collect ── the thread that scrapes
    JobRun ──▶ PipelineCollector, one per job ───▲

The metrics of a job stay for a while after its run, so that a scrape finds its last steps; if the job runs again, they
continue. Nothing is registered globally.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from threading import Lock
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from asyncpipe.observe.metrics import MergedCollector, PipelineCollector
from asyncpipe.service.job_states import JobRecord, JobState
from asyncpipe.service.jobs.user_metrics import UserMetrics

__all__ = ["ServiceMetrics"]

WAITING = [2.0**exponent for exponent in range(-4, 21)]
"""Bounds of the buckets of waiting times: from 1/16 s to 12 days."""
MOST_FAILED = 32
"""How many jobs that failed or were quarantined are shown."""
MOST_ENDED, KEPT_SECONDS = 16, 45.0
"""How many jobs keep their metrics after their runs have ended, and how long: three scrapes, at the usual interval."""
ID_END = 6
"""Characters of a job's id that are appended to its name, where another job has the same name."""


class ServiceMetrics(Collector):
    """A collector for a registry that counts the events of a service's jobs. Any thread may call any method."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_ready: Callable[[], bool] = lambda: False
        """Called at each scrape, like the next four."""
        self.commits: Callable[[], int] = lambda: 0
        self.hung_tasks: Callable[[], int] = lambda: 0
        self.heartbeats: Callable[[], Mapping[str, float]] = dict
        self.drained: Callable[[], Mapping[str, bool]] = dict
        self.users = UserMetrics()
        """What users have."""
        self._merged = MergedCollector()
        self._collectors: dict[str, PipelineCollector] = {}
        """By job."""
        self._ended: dict[str, float] = {}
        """When the last run of each job among them has ended that does not run, by ``_clock``; the oldest first."""
        self._clock = clock
        self._jobs: Counter[str] = Counter(dict.fromkeys(JobState, 0))
        self._transitions: Counter[str] = Counter(dict.fromkeys(JobState, 0))
        self._retries: Counter[str] = Counter(step=0, snapshot=0)
        self._log_failures = 0
        self._failed: dict[str, tuple[str, JobState, float]] = {}
        """Name, state and since when, by the ids of jobs that failed or were quarantined last, oldest first."""
        self._waited = [0] * (len(WAITING) + 1)
        self._waited_seconds = 0.0
        self._lock = Lock()

    # Events

    def there_are(self, jobs: Mapping[JobState, int]) -> None:
        """Set the number of jobs in each state."""
        with self._lock:
            self._jobs = Counter({state: jobs.get(state, 0) for state in JobState})

    def have_failed(self, jobs: Iterable[tuple[str, str, JobState, float]]) -> None:
        """Set the jobs that failed or were quarantined last: (id, name, state, since when), oldest first."""
        with self._lock:
            self._failed = {job: (name, state, at) for job, name, state, at in jobs}

    def changed(self, before: JobState | None, record: JobRecord) -> None:
        """Count a transition to the state of ``record``; ``before`` is ``None`` for a submission."""
        with self._lock:
            if before is not None:
                self._jobs[before] -= 1
            self._jobs[record.state] += 1
            self._transitions[record.state] += 1
            self._failed.pop(record.id, None)
            if record.state in (JobState.FAILED, JobState.QUARANTINED):
                self._failed[record.id] = record.name, record.state, record.updated
                while len(self._failed) > MOST_FAILED:
                    del self._failed[next(iter(self._failed))]

    def deleted(self, state: JobState) -> None:
        """A job in ``state`` was deleted."""
        with self._lock:
            self._jobs[state] -= 1

    def waited(self, seconds: float) -> None:
        """Count a job that started after so many seconds in the queue."""
        with self._lock:
            self._waited[bisect_left(WAITING, seconds)] += 1
            self._waited_seconds += max(seconds, 0.0)

    def retried(self, how: str) -> None:
        """Count a retry of a ``"step"``, or of a job from its last ``"snapshot"``."""
        with self._lock:
            self._retries[how] += 1

    def log_failed(self) -> None:
        """Count a failure to write a job's log."""
        with self._lock:
            self._log_failures += 1

    # The metrics of each job

    def collector_of(self, record: JobRecord) -> PipelineCollector:
        """The collector for a job that starts: the one of its last run, if it is still kept.

        Its label is the job's name, with the end of the job's id appended if another job has the same name.
        """
        self.users.began(record)
        with self._lock:
            collector = self._collectors.pop(record.id, None)
            if collector is None:
                taken = {other.job for other in self._collectors.values()}
                name = record.name
                collector = PipelineCollector(name if name not in taken else _distinct(name, record.id, taken))
                self._merged.add(collector)
            self._collectors[record.id] = collector
            self._ended.pop(record.id, None)
            return collector

    def ended(self, job: str) -> None:
        """A run of ``job`` has ended; its metrics stay for ``KEPT_SECONDS``, if not too many other runs end."""
        self.users.ended(job)
        with self._lock:
            if job in self._collectors:
                self._ended[job] = self._clock()
                self._forget()

    def _forget(self) -> None:
        """Leave out what has been kept for long enough."""
        late = sum(at <= self._clock() - KEPT_SECONDS for at in self._ended.values())
        for job in list(self._ended)[: max(late, len(self._ended) - MOST_ENDED)]:
            del self._ended[job]
            self._merged.remove(self._collectors.pop(job))

    # Prometheus

    def collect(self) -> Iterator[Metric]:
        """All metric families of the service and of its jobs. Called by the thread that scrapes."""
        with self._lock:
            self._forget()
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
            failed = {(name, str(state)): at for name, state, at in self._failed.values()}
            running = {each.job: job not in self._ended for job, each in self._collectors.items()}
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        yield _family(gauge, "jobs", "Jobs by state.", jobs, "state")
        yield _family(gauge, "job_running", "1 while the job runs, 0 after its run.", running, "job")
        text = "Unix time since which a job is failed or quarantined, of those that became so last."
        yield _family(gauge, "job_failure_timestamp_seconds", text, failed, "job", "state")
        text = "Transitions of jobs since the service started, by the state that they led to."
        yield _family(counter, "job_transitions", text, transitions, "to")
        text = "Retries after failures: of a step on the same batch, or of a job from its last snapshot."
        yield _family(counter, "job_retries", text, retries, "how")
        text = "Seconds in the queue before a job started, for each start."
        yield HistogramMetricFamily("asyncpipe_job_queue_seconds", text, buckets=_buckets(waited), sum_value=seconds)
        yield _family(gauge, "service_ready", "1 if the service takes new jobs, else 0.", {(): ready})
        yield _family(
            counter, "store_commits", "Transactions of the job store since the service started.", {(): commits}
        )
        text = "Tasks that ran much longer than before, so that their steps were failed."
        yield _family(counter, "hung_tasks", text, {(): hung})
        text = "Seconds since something came from a worker of the service that is up."
        yield _family(gauge, "worker_heartbeat_age_seconds", text, self.heartbeats(), "worker")
        text = "1 while jobs are to leave the host, else 0. A worker that names no host is one by itself."
        yield _family(gauge, "host_draining", text, self.drained(), "host")
        devices, queued = self.users.now()
        text = "Devices of running jobs, each once for each job that has it, by the user whose jobs they are."
        yield _family(gauge, "user_running_devices", text, devices, "user")
        yield _family(gauge, "user_queued_jobs", "Queued jobs by user.", queued, "user")
        yield _family(counter, "job_log_failures", "Failures to write the files of a job's log.", {(): log_failures})


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    values: Mapping[Any, float],
    *labels: str,
) -> Metric:
    """The family ``asyncpipe_NAME`` with a sample for each of ``values``, by the value or values of its ``labels``."""
    family = kind(f"asyncpipe_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(key if isinstance(key, tuple) else (str(key),), float(value))
    return family


def _buckets(counts: list[int]) -> list[tuple[str, float]]:
    return list(zip([*map(repr, WAITING), "+Inf"], map(float, accumulate(counts)), strict=True))


def _distinct(name: str, job: str, taken: set[str]) -> str:
    """``name`` with as much of the end of the job's id as makes it differ from the names that are ``taken``."""
    ends = (f"{name}-{job[-length:]}" for length in range(ID_END, len(job)))
    return next((end for end in ends if end not in taken), f"{name}-{job}")
