"""The part of the dashboard *Service* about the jobs of a service: how many there are, how long they wait, retries.

These metrics are about the service, not about single jobs, so the variable *Job* does not filter them. Panels show
several services separately, by their addresses, only where that matters; elsewhere they show sums.
"""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Panel

from dashboards.board import Band
from dashboards.panels import PanelOptions, Query, lines, number, series_style, table
from dashboards.queries import increase, quantile, rate, series, total
from dashboards.states import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION

__all__ = ["jobs"]

STATES = (
    series_style("queued", "queued", ORANGE),
    series_style("running", "running", BLUE),
    series_style("paused", "paused", PURPLE),
    series_style("finished", "finished", GREEN),
    series_style("failed", "failed", "red"),
    series_style("cancelled", "cancelled", GREY),
    series_style("quarantined", "quarantined", VERMILION),
)
GOING_ON = 'state=~"queued|running|paused"'
EVER = ((None, "text"), (0.5, "red"))
"""Red from one event on. The threshold is 0.5 because increases over a range are not integers."""


def jobs() -> tuple[Band, ...]:
    """Numbers of jobs and their transitions, then values that should be zero, then waits, retries and commits."""
    return (
        Band(8, ((_states(), 12), (_transitions(), 12))),
        Band(4, ((_takes_jobs(), 8), (_hung_tasks(), 8), (_log_failures(), 8))),
        Band(8, ((_waiting(), 8), (_retries(), 8), (_commits(), 8))),
        Band(8, _by_user()),
        Band(8, ((_failed_jobs(), 24),)),
        Band(8, ((_heartbeats(), 16), (_draining(), 8))),
    )


def _states() -> Panel:
    options = PanelOptions(
        title="Jobs by state",
        about="Jobs that have not ended, of all services that are scraped. If the queue only grows, jobs arrive "
        "faster than they end.",
        unit="none",
        decimals=0,
        runbook=("AsyncpipeJobsWaitTooLong",),
        names=STATES[:3],
    )
    query = Query(total("state", series("jobs", GOING_ON)), "{{state}}")
    return lines(options, query, stacked=True, held=True)


def _transitions() -> Panel:
    options = PanelOptions(
        title="Transitions of jobs",
        about="Jobs per minute that entered each state. A job that alternates between queued and running fails and "
        "goes back to its snapshot.",
        unit="suffix: /min",
        runbook=("AsyncpipeJobRetries",),
        names=STATES,
    )
    return lines(options, Query(f"60 * {total('to', rate('job_transitions_total'))}", "{{to}}"))


def _takes_jobs() -> Panel:
    options = PanelOptions(
        title="Takes jobs",
        about="Whether each service accepts new jobs. It does not while it starts and while it shuts down; at any "
        "other time, No means that it is broken.",
        unit="bool_yes_no",
        steps=((None, "red"), (1, "green")),
        runbook=("AsyncpipeServiceNotReady",),
    )
    query = Query(f"min by (instance) ({series('service_ready')})", "{{instance}}")
    return number(options, query, instant=True, named=True)


def _hung_tasks() -> Panel:
    options = PanelOptions(
        title="Hung tasks",
        about="Tasks within the time range that were abandoned because they ran much longer than before.",
        unit="none",
        decimals=0,
        steps=EVER,
        runbook=("AsyncpipeHungTasks",),
    )
    return number(options, Query(total("instance", increase("hung_tasks_total")), "{{instance}}"), instant=True)


def _log_failures() -> Panel:
    options = PanelOptions(
        title="Log failures",
        about="How often, within the time range, a job's log could not be written, usually because the disk is full. "
        "The job continues; the log lacks the entries of that time.",
        unit="none",
        decimals=0,
        steps=EVER,
    )
    return number(options, Query(total("instance", increase("job_log_failures_total")), "{{instance}}"), instant=True)


def _failed_jobs() -> Panel:
    options = PanelOptions(
        title="Failed and quarantined jobs",
        about="How long ago jobs failed or were quarantined, of the last 32, until they are tried again. Each new one "
        "is an alert.",
        unit="s",
        low=None,
        runbook=("AsyncpipeJobFailed", "AsyncpipeJobQuarantined"),
    )
    since = f"time() - max by (job, state) ({series('job_failure_timestamp_seconds')})"
    names = (("job", (("displayName", "Job"),)), ("state", (("displayName", "State"),)))
    return table(options, (Query(since, "Since"), (("unit", "s"), ("decimals", 0))), first=names)


def _heartbeats() -> Panel:
    options = PanelOptions(
        title="Age of heartbeats",
        about="Seconds since something came from a worker process that is up. It is asked every half second, so this "
        "is short while it lives; after 20 s it is taken for hung. Empty for services whose devices are threads.",
        unit="s",
        runbook=("AsyncpipeWorkerLost",),
    )
    query = Query(f"max by (instance, worker) ({series('worker_heartbeat_age_seconds')})", "{{worker}} {{instance}}")
    return lines(options, query)


def _draining() -> Panel:
    options = PanelOptions(
        title="Drained hosts",
        about="1 while jobs are to leave a host, as asked by `asyncpipe jobs drain`. They go on elsewhere, or wait if "
        "nothing is left.",
        unit="none",
        high=1,
        decimals=0,
        runbook=("AsyncpipeWorkerLost",),
    )
    return lines(
        options, Query(f"max by (instance, host) ({series('host_draining')})", "{{host}} {{instance}}"), held=True
    )


def _waiting() -> Panel:
    options = PanelOptions(
        title="Time in the queue",
        about="How long the jobs that began within the time range had waited. Jobs that still wait are not counted.",
        unit="s",
        runbook=("AsyncpipeJobsWaitTooLong",),
    )
    shares = (0.5, "median"), (0.95, "95 %")
    return lines(options, *(Query(quantile(share, "job_queue_seconds", over=increase), name) for share, name in shares))


def _by_user() -> tuple[tuple[Panel, int], ...]:
    users = "The first 20 users have lines of their own; all others together are *other*."
    devices = PanelOptions(
        title="Devices by user",
        about=f"Devices of running jobs, each once for each job that has it, by the user whose jobs they are. {users}",
        unit="none",
        decimals=0,
    )
    queued = PanelOptions(
        title="Queued jobs by user",
        about="Jobs that wait, by the user whose jobs they are. One user's many jobs need not delay the others.",
        unit="none",
        decimals=0,
        runbook=("AsyncpipeJobsWaitTooLong",),
    )
    now, waiting = (
        Query(total("user", series("user_running_devices")), "{{user}}"),
        Query(total("user", series("user_queued_jobs")), "{{user}}"),
    )
    return (
        (lines(devices, now, stacked=True, held=True), 12),
        (lines(queued, waiting, stacked=True, held=True), 12),
    )


def _retries() -> Panel:
    options = PanelOptions(
        title="Retries",
        about="Retries per minute: of a step with the same batch, or of a job from its last snapshot.",
        unit="suffix: /min",
        runbook=("AsyncpipeJobRetries", "AsyncpipeTaskFailures"),
    )
    return lines(options, Query(f"60 * {total('how', rate('job_retries_total'))}", "from its {{how}}"))


def _commits() -> Panel:
    options = PanelOptions(
        title="Store commits",
        about="Transactions of the job store per second; each waits for the disk. A running job makes at most one per "
        "second.",
        unit="suffix: /s",
    )
    return lines(options, Query(total("instance", rate("store_commits_total")), "{{instance}}"))
