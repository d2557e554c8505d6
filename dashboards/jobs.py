"""The part of the dashboard *Service* about jobs as a service has them: how many, how long they wait, what is retried.

Its metrics are the service's own. They say nothing of single jobs, so the choice of a job above leaves them as they
are; several services are told apart by their address only where it matters, and summed elsewhere.
"""

from __future__ import annotations

from dashboards.board import Band
from dashboards.panels import Face, Query, called, lines, number
from dashboards.queries import increase, quantile_of_range, rate, series, total
from dashboards.sdk import Panel

__all__ = ["jobs"]

STATES = (
    called("queued", "queued", "#E69F00"),
    called("running", "running", "#0072B2"),
    called("paused", "paused", "#CC79A7"),
    called("finished", "finished", "#009E73"),
    called("failed", "failed", "red"),
    called("cancelled", "cancelled", "#8C8C8C"),
)
GOING_ON = 'state=~"queued|running|paused"'
EVER = ((None, "text"), (0.5, "red"))
"""From one on it is red; increases over a range are no integers."""


def jobs() -> tuple[Band, ...]:
    """What there is and what becomes of it, then what should be zero, then how long it takes."""
    return (
        Band(8, ((_states(), 12), (_transitions(), 12))),
        Band(4, ((_takes_jobs(), 8), (_hung_tasks(), 8), (_log_failures(), 8))),
        Band(8, ((_waiting(), 8), (_retries(), 8), (_commits(), 8))),
    )


def _states() -> Panel:
    face = Face(
        title="Jobs by state",
        about="Jobs that are not at their end, of all services that are scraped. A queue that only grows: jobs come "
        "faster than they end.",
        unit="none",
        decimals=0,
        runbook=("AsyncpipeJobsWaitTooLong",),
        names=STATES[:3],
    )
    query = Query(total("state", series("jobs", GOING_ON)), "{{state}}")
    return lines(face, query, stacked=True, held=True)


def _transitions() -> Panel:
    face = Face(
        title="Transitions of jobs",
        about="Jobs per minute that came into each state. The same job again and again queued and running: it fails "
        "and goes back to its snapshot.",
        unit="suffix: /min",
        runbook=("AsyncpipeJobRetries",),
        names=STATES,
    )
    return lines(face, Query(f"60 * {total('to', rate('job_transitions_total'))}", "{{to}}"))


def _takes_jobs() -> Panel:
    face = Face(
        title="Takes jobs",
        about="Whether each service takes new jobs. Not while it starts or is told to end; otherwise it is broken.",
        unit="bool_yes_no",
        steps=((None, "red"), (1, "green")),
        runbook=("AsyncpipeServiceNotReady",),
    )
    query = Query(f"min by (instance) ({series('service_ready')})", "{{instance}}")
    return number(face, query, instant=True, named=True)


def _hung_tasks() -> Panel:
    face = Face(
        title="Hung tasks",
        about="Tasks within the time range that ran so much longer than before that they were given up.",
        unit="none",
        decimals=0,
        steps=EVER,
        runbook=("AsyncpipeHungTasks",),
    )
    return number(face, Query(total("instance", increase("hung_tasks_total")), "{{instance}}"), instant=True)


def _log_failures() -> Panel:
    face = Face(
        title="Log failures",
        about="Times within the time range that a job's log could not be written, mostly since the disk is full. The "
        "job trains on; what is missing there afterwards is what happened meanwhile.",
        unit="none",
        decimals=0,
        steps=EVER,
    )
    return number(face, Query(total("instance", increase("job_log_failures_total")), "{{instance}}"), instant=True)


def _waiting() -> Panel:
    face = Face(
        title="Time in the queue",
        about="How long jobs had waited that began within the time range; those that still wait do not count yet.",
        unit="s",
        runbook=("AsyncpipeJobsWaitTooLong",),
    )
    shares = (0.5, "median"), (0.95, "95 %")
    return lines(face, *(Query(quantile_of_range(share, "job_queue_seconds"), name) for share, name in shares))


def _retries() -> Panel:
    face = Face(
        title="Retries",
        about="Failures per minute that were tried again: a step with the same batch, or a job from its last snapshot.",
        unit="suffix: /min",
        runbook=("AsyncpipeJobRetries", "AsyncpipeTaskFailures"),
    )
    return lines(face, Query(f"60 * {total('how', rate('job_retries_total'))}", "from its {{how}}"))


def _commits() -> Panel:
    face = Face(
        title="Store commits",
        about="Transactions of the job store per second, each of which waits for the disk. A running job makes one a "
        "second at most.",
        unit="suffix: /s",
    )
    return lines(face, Query(total("instance", rate("store_commits_total")), "{{instance}}"))
