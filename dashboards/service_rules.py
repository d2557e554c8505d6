"""Alerts about a service and its jobs. They are by ``instance``, since metrics about the service have no label ``job``.

Rare events are counted within the last hour, so that an alert lasts long enough to be noticed. These counts are not
integers, because ``increase`` extrapolates a little beyond the samples.
"""

from __future__ import annotations

from dashboards.rule import Alert

__all__ = ["RESTING", "SERVICE_ALERTS"]

RESTING = "unless on (instance, job) asyncpipe_job_running == 0"
"""Excludes jobs that have ended or are paused: a service keeps their metrics for a while, and they are not late."""

_READY = """\
min by (instance) (asyncpipe_service_ready)
or on (instance) 0 * max by (instance) (last_over_time(asyncpipe_service_ready[1d]))"""
"""1 or 0; 0 also for a service that was scraped within the last day and is missing now."""

_NONE_BEGINS = """\
sum by (instance) (asyncpipe_jobs{state="queued"})
* on (instance) (sum by (instance) (increase(asyncpipe_job_transitions_total{to="running"}[WINDOW])) == bool 0)"""
"""The number of queued jobs if none has begun within the window. A job's own wait is only known when it begins."""

SERVICE_ALERTS = (
    Alert(
        name="AsyncpipeServiceNotReady",
        value=_READY,
        comparison="<",
        threshold=1,
        hold=300,
        severity="critical",
        summary="the service {{ $labels.instance }} accepts no jobs",
        description="{{ $labels.instance }} has accepted no jobs for five minutes, or cannot be reached.",
        runbook="AsyncpipeServiceNotReady",
    ),
    Alert(
        name="AsyncpipeJobsWaitTooLong",
        value=_NONE_BEGINS,
        comparison=">",
        threshold=0,
        hold=3600,
        severity="warning",
        summary="jobs of {{ $labels.instance }} wait and none begins",
        description="{{ $value }} jobs of {{ $labels.instance }} wait, and for an hour none has begun.",
        runbook="AsyncpipeJobsWaitTooLong",
    ),
    Alert(
        name="AsyncpipeJobRetries",
        value='sum by (instance) (increase(asyncpipe_job_retries_total{how="snapshot"}[1h]))',
        comparison=">",
        threshold=2.5,
        hold=0,
        severity="warning",
        summary="jobs of {{ $labels.instance }} fail again and again",
        description=(
            'Jobs of {{ $labels.instance }} went back to their last snapshots {{ $value | printf "%.0f" }} times '
            "within an hour."
        ),
        runbook="AsyncpipeJobRetries",
    ),
    Alert(
        name="AsyncpipeHungTasks",
        value="sum by (instance) (increase(asyncpipe_hung_tasks_total[1h]))",
        comparison=">",
        threshold=0,
        hold=0,
        severity="critical",
        summary="tasks of {{ $labels.instance }} hang",
        description=(
            "Within the last hour a task of {{ $labels.instance }} did not end and was abandoned; the log has the "
            "stacks of all threads."
        ),
        runbook="AsyncpipeHungTasks",
    ),
)
