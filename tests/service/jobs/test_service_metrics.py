"""What a service tells Prometheus: right sums, one label for each job, and no more series than there have to be."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from asyncpipe.service.job_states import JobRecord, JobState
from asyncpipe.service.jobs import service_metrics, user_metrics
from asyncpipe.service.jobs.service_metrics import ServiceMetrics

QUEUED, RUNNING, PAUSED, FINISHED, FAILED, CANCELLED, QUARANTINED = JobState


def record(job: str, name: str = "job", state: JobState = RUNNING, at: float = 0.0) -> JobRecord:
    return JobRecord(job, {"name": name, "entry": "m:f"}, state, "because", 0.0, at)


def samples(metrics: ServiceMetrics, family: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix(f"asyncpipe_{family}"), *sample.labels.values()): sample.value
        for each in metrics.collect()
        if each.name == f"asyncpipe_{family}"
        for sample in each.samples
    }


def labels(metrics: ServiceMetrics) -> set[str]:
    return {labels[1] for labels in samples(metrics, "build")}


def test_jobs_are_counted_by_state_from_what_the_store_has_on():
    metrics = ServiceMetrics()
    metrics.there_are({QUEUED: 2, FINISHED: 5})
    metrics.changed(None, record("1", state=QUEUED))
    metrics.changed(QUEUED, record("1"))
    metrics.changed(RUNNING, record("1", state=FAILED))
    jobs = {state: samples(metrics, "jobs")["", state] for state in JobState}
    assert jobs == {QUEUED: 2, RUNNING: 0, PAUSED: 0, FINISHED: 5, FAILED: 1, CANCELLED: 0, QUARANTINED: 0}
    transitions = samples(metrics, "job_transitions")
    assert (transitions["_total", "queued"], transitions["_total", "finished"]) == (1, 0)


def test_jobs_that_have_failed_are_named_until_they_are_tried_again(monkeypatch):
    monkeypatch.setattr(service_metrics, "MOST_FAILED", 3)
    metrics = ServiceMetrics()
    metrics.have_failed([("1", "old", FAILED, 5.0), ("2", "other", QUARANTINED, 6.0)])
    metrics.changed(RUNNING, record("3", "nan", FAILED, 7.0))
    failed = samples(metrics, "job_failure_timestamp_seconds")
    assert failed == {("", "old", "failed"): 5.0, ("", "other", "quarantined"): 6.0, ("", "nan", "failed"): 7.0}
    metrics.changed(FAILED, record("3", "nan", QUEUED, 8.0))
    metrics.changed(RUNNING, record("3", "nan", FINISHED, 9.0))
    assert len(samples(metrics, "job_failure_timestamp_seconds")) == 2
    for number in range(10, 13):
        metrics.changed(RUNNING, record(str(number), f"job {number}", FAILED, float(number)))
    failed = samples(metrics, "job_failure_timestamp_seconds")
    assert sorted(failed.values()) == [10.0, 11.0, 12.0]


def test_waiting_times_fall_into_buckets_of_powers_of_two():
    metrics = ServiceMetrics()
    for seconds in (-1.0, 0.01, 1.0, 1.5, 1e9):
        metrics.waited(seconds)
    found = samples(metrics, "job_queue_seconds")
    counts = [found["_bucket", bound] for bound in ("0.0625", "0.5", "1.0", "2.0", "1048576.0", "+Inf")]
    assert counts == [2, 2, 3, 4, 4, 5]
    assert found["_sum",] == 1e9 + 2.51


def test_what_is_asked_at_each_scrape():
    metrics = ServiceMetrics()
    assert samples(metrics, "service_ready") == {("",): 0.0}
    metrics.is_ready, metrics.commits, metrics.hung_tasks = (lambda: True), (lambda: 7), (lambda: 2)
    metrics.retried("step")
    metrics.log_failed()
    assert samples(metrics, "service_ready") == {("",): 1.0}
    assert samples(metrics, "store_commits") == {("_total",): 7}
    assert samples(metrics, "hung_tasks") == {("_total",): 2}
    assert samples(metrics, "job_retries") == {("_total", "step"): 1, ("_total", "snapshot"): 0}
    assert samples(metrics, "job_log_failures") == {("_total",): 1}


def test_each_job_has_a_label_of_its_own_and_counts_on_when_it_runs_again():
    metrics = ServiceMetrics()
    first = metrics.collector_of(record("01-aaaaaa"))
    second = metrics.collector_of(record("02-bbbbbb"))
    third = metrics.collector_of(record("03-bbbbbb"))
    assert [each.job for each in (first, second, third)] == ["job", "job-bbbbbb", "job--bbbbbb"]
    metrics.ended("01-aaaaaa")
    assert labels(metrics) == {"job", "job-bbbbbb", "job--bbbbbb"}
    assert metrics.collector_of(record("01-aaaaaa")) is first
    metrics.ended("never ran")


def test_the_metrics_of_jobs_that_ended_long_ago_are_gone(monkeypatch):
    monkeypatch.setattr(service_metrics, "MOST_ENDED", 3)
    metrics = ServiceMetrics()
    metrics.collector_of(record("runs", "runs"))
    for number in range(20):
        metrics.collector_of(record(f"{number}", f"job {number}"))
        metrics.ended(f"{number}")
    assert labels(metrics) == {"runs", "job 17", "job 18", "job 19"}
    assert metrics.collector_of(record("3", "job 3")).job == "job 3"


def test_the_metrics_of_a_job_are_gone_within_a_minute_after_its_run():
    now = [1000.0]
    metrics = ServiceMetrics(clock=lambda: now[0])
    for job in ("runs", "early", "late", "again"):
        metrics.collector_of(record(job, job))
    metrics.ended("early")
    again = metrics.collector_of(record("again", "again"))
    metrics.ended("again")
    now[0] += 30
    metrics.ended("late")
    assert metrics.collector_of(record("again", "again")) is again
    assert labels(metrics) == {"runs", "early", "late", "again"}
    now[0] += 15
    assert labels(metrics) == {"runs", "late", "again"}
    now[0] += 3600
    assert labels(metrics) == {"runs", "again"}
    assert set(samples(metrics, "job_running")) == {("", "runs"), ("", "again")}


def test_a_registry_takes_it():
    registry = CollectorRegistry()
    registry.register(ServiceMetrics())
    text = generate_latest(registry).decode()
    assert "asyncpipe_job_queue_seconds_count 0.0" in text
    assert text.count("# HELP asyncpipe_steps_total") == 1


def test_users_have_series_and_no_more_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_metrics, "MOST_USERS", 2)
    metrics = ServiceMetrics()

    def of(user: str | None, job: str, devices: int = 1, state: JobState = RUNNING) -> JobRecord:
        placed = tuple(f"cpu:{index}" for index in range(devices))
        return JobRecord(job, {"name": "job", "entry": "m:f"}, state, "because", 0.0, 0.0, owner=user, placed=placed)

    def seen(family: str) -> dict[str, float]:
        return {labels[-1]: value for labels, value in samples(metrics, f"user_{family}").items()}

    for job, user in enumerate([None, "alice", "bob", "carol", "dan", "alice"]):
        metrics.users.queued(of(user, f"q{job}", state=QUEUED))
    assert seen("queued_jobs") == {"alice": 2, "bob": 1, "other": 2}
    metrics.users.unqueued("q1")
    metrics.users.unqueued("q1")
    for job, user, devices in (("1", "alice", 2), ("2", "carol", 1), ("3", "dan", 3), ("4", None, 8)):
        metrics.collector_of(of(user, job, devices))
    metrics.ended("2")
    metrics.ended("2")
    assert seen("queued_jobs") == {"alice": 1, "bob": 1, "other": 2}
    assert seen("running_devices") == {"alice": 2, "bob": 0, "other": 3}
    metrics.ended("1")
    assert seen("running_devices") == {"alice": 0, "bob": 0, "other": 3}
