"""Alerts about a service and its jobs. They are by ``instance``: what a service tells of itself names no job.

Rare events are looked for within an hour, so that an alert stays long enough to be seen; how often something happens is
not known to the last digit there, since ``increase`` reaches a little beyond the samples that it has.
"""

from __future__ import annotations

from dashboards.rule import Alert

__all__ = ["RESTING", "SERVICE_ALERTS"]

RESTING = "unless on (instance, job) asyncpipe_job_running == 0"
"""A service shows jobs for a while that have ended or pause; those are not late."""

_READY = """\
min by (instance) (asyncpipe_service_ready)
or on (instance) 0 * max by (instance) (last_over_time(asyncpipe_service_ready[1d]))"""
"""1 or 0; 0 also for a service that was there within the last day and is not now."""

_NONE_BEGINS = """\
sum by (instance) (asyncpipe_jobs{state="queued"})
* on (instance) (sum by (instance) (increase(asyncpipe_job_transitions_total{to="running"}[WINDOW])) == bool 0)"""
"""How many jobs wait where none has begun lately. How long each has waited is known only when it begins."""

SERVICE_ALERTS = (
    Alert(
        name="AsyncpipeServiceNotReady",
        value=_READY,
        comparison="<",
        threshold=1,
        hold=300,
        severity="critical",
        summary="the service {{ $labels.instance }} takes no jobs",
        description="{{ $labels.instance }} has taken no jobs for five minutes, or is not there.",
        runbook="AsyncpipeServiceNotReady",
    ),
    Alert(
        name="AsyncpipeJobsWaitTooLong",
        value=_NONE_BEGINS,
        comparison=">",
        threshold=0,
        hold=3600,
        severity="warning",
        summary="jobs of {{ $labels.instance }} wait, and none begins",
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
            "A task of {{ $labels.instance }} was given up within the last hour, since it did not end; the log has "
            "the stacks of all threads."
        ),
        runbook="AsyncpipeHungTasks",
    ),
)
