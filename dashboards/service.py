"""The dashboard *Service*: which jobs run, whether they progress, and what fails; at the end, the runbook."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

from asyncpipe.core.kinds import TaskKind
from dashboards.board import Band, Section, board
from dashboards.jobs import jobs
from dashboards.panels import SERVICE, PanelOptions, Property, Query, lines, number, series_style, table, thresholds
from dashboards.queries import increase, mean, quantile, rate, series, total
from dashboards.states import GREEN, GREY, ORANGE, in_steps

__all__ = ["service"]

ABOUT = "Which jobs run, whether they progress, and what fails. The runbook is at the bottom."
PIPELINE_OF_JOB = "/d/asyncpipe-pipeline?${__url_time_range}&var-job=${__data.fields.job}"
MEDIAN, MOST, NEARLY_ALL = (0.5, "median"), (0.95, "95 %"), (0.99, "99 %")
FAILED = 'outcome="failed"'
LATE = thresholds((None, "transparent"), (60, ORANGE), (300, "red"))
ANY = thresholds((None, "transparent"), (0.5, "red"))
NAMED: Sequence[tuple[str, Sequence[Property]]] = (
    ("job", (("displayName", "Job"),)),
    ("version", (("displayName", "Version"),)),
)
OUTCOMES = (
    series_style("ok", "ok", GREEN),
    series_style("failed", "failed", "red"),
    series_style("cancelled", "cancelled", GREY),
)


Quantile = tuple[float, str]


def service(runbook: Sequence[Band]) -> Dashboard:
    """The dashboard, ready to be written, with the ``runbook``'s panels at its end."""
    sections = (
        Section("", (Band(6, ((_jobs(), 24),)), _progress())),
        Section("Jobs of the service", jobs()),
        Section("Tasks and scheduler", _scheduler()),
        Section("What fails", _failures()),
        Section("Snapshots and versions", _snapshots()),
        Section("Runbook", runbook),
    )
    return board(SERVICE, "asyncpipe: Service", ABOUT, sections)


def _jobs() -> Panel:
    options = PanelOptions(
        title="Jobs",
        about="One line for each job that is scraped; its name is a link to the dashboard Pipeline. Task failures are "
        "those within the time range.",
        unit="none",
        low=None,
        runbook=("AsyncpipeStalled", "AsyncpipeTaskFailures"),
    )
    background: Property = ("custom.cellOptions", {"type": "color-background", "mode": "basic"})
    link = {"title": "Its pipeline", "url": PIPELINE_OF_JOB, "targetBlank": False}
    busy = total("job", rate("stage_busy_seconds_total"))
    columns: list[tuple[Query, Sequence[Property]]] = [
        (Query(_since("last_step"), "Since the last step"), (("unit", "s"), ("decimals", 0), background, LATE)),
        (Query(total("job", rate("step_duration_seconds_count")), "Steps per second"), (("decimals", 2),)),
        (Query(f"max by (job) ({series('loss')})", "Loss"), (("decimals", 3),)),
        (Query(total("job", rate("tokens_total")), "Tokens per second"), (("unit", "short"),)),
        (Query(f"1 - {busy}\n  / {in_steps('job')}", "Bubble"), (("unit", "percentunit"), ("decimals", 0))),
        (Query(_lately("tasks_total", FAILED), "Task failures"), (("decimals", 0), background, ANY)),
    ]
    return table(options, *columns, first=[("job", (("displayName", "Job"), ("links", [link])))])


def _progress() -> Band:
    since = PanelOptions(
        title="Time since the last step",
        about="A job that works draws small teeth. A long slope is a job that has stopped, or a long step.",
        unit="s",
        runbook=("AsyncpipeStalled",),
    )
    speed = PanelOptions(
        title="Steps per second",
        about="Steps that ended, whatever their outcome.",
        unit="suffix: /s",
        runbook=("AsyncpipeStalled",),
    )
    return Band(
        7,
        (
            (lines(since, Query(_since("last_step"), "{{job}}")), 12),
            (lines(speed, Query(total("job", rate("step_duration_seconds_count")), "{{job}}")), 12),
        ),
    )


def _scheduler() -> tuple[Band, ...]:
    queue = PanelOptions(
        title="Task queue time",
        about="From the moment a task was ready to its start. Long on one device: it is the bottleneck. Long on all "
        "devices: the scheduler does not dispatch in time.",
        unit="s",
        runbook=("Waiting for the scheduler",),
    )
    ready = PanelOptions(
        title="Ready tasks",
        about="How many tasks were ready and waited for their device, on average over the last step.",
        unit="none",
        runbook=("Waiting for the scheduler",),
    )
    queued = _quantiles("task_queue_seconds", "job, device", "{{device}}", MEDIAN, MOST)
    waiting = Query(f"max by (job, device) ({series('ready_tasks')})", "{{device}}")
    return (
        Band(8, ((lines(queue, *queued, beside=True), 12), (lines(ready, waiting, held=True, beside=True), 12))),
        _loop(),
    )


def _loop() -> Band:
    lag = PanelOptions(
        title="Event loop lag",
        about="How late the event loop ran a wake-up of the scheduler. High: something else blocks the loop.",
        unit="s",
        runbook=("AsyncpipeLoopLag",),
    )
    took = PanelOptions(
        title="Scheduler time per wake-up",
        about="How long the scheduler handles events and dispatches tasks. High: a huge graph or a slow rule.",
        unit="s",
        runbook=("AsyncpipeLoopLag",),
    )
    share = PanelOptions(
        title="Scheduler busy",
        about="Share of its thread's time in which the scheduler works. Near 1 it slows the devices down.",
        unit="percentunit",
        runbook=("Waiting for the scheduler",),
    )
    late = _quantiles("scheduler_loop_lag_seconds", "job", "{{job}}", MEDIAN, MOST, NEARLY_ALL)
    taken = [Query(mean("scheduler_dispatch_seconds", "job"), "mean {{job}}")]
    taken += _quantiles("scheduler_dispatch_seconds", "job", "{{job}}", NEARLY_ALL)
    busy = Query(total("job", rate("scheduler_dispatch_seconds_sum")), "{{job}}")
    return Band(8, ((lines(lag, *late), 8), (lines(took, *taken), 8), (lines(share, busy), 8)))


def _failures() -> tuple[Band, ...]:
    steps = PanelOptions(
        title="Steps by outcome",
        about="Steps per minute that succeeded, failed, or were cancelled. A failed step changes no weights.",
        unit="suffix: /min",
        runbook=("AsyncpipeTaskFailures",),
        names=OUTCOMES,
    )
    tasks = PanelOptions(
        title="Failures",
        about="Tasks per minute that raised an error, by kind. The log names micro-batch, stage and device.",
        unit="suffix: /min",
        runbook=("AsyncpipeTaskFailures",),
        names=tuple(series_style(kind.value, kind.word, kind.colour) for kind in TaskKind),
    )
    observers = PanelOptions(
        title="Observer failures",
        about="Failures of observers per minute, by reason; training continues without them.",
        unit="suffix: /min",
        runbook=("AsyncpipeObserverFailing",),
    )
    failed = Query(f"60 * {total('kind', rate('tasks_total', FAILED))}", "{{kind}}")
    lost = Query(f"60 * {total('reason', rate('observer_failures_total'))}", "{{reason}}")
    ended = Query(f"60 * {total('outcome', rate('steps_total'))}", "{{outcome}}")
    return (Band(8, ((lines(steps, ended), 8), (lines(tasks, failed), 8), (lines(observers, lost), 8))),)


def _snapshots() -> tuple[Band, ...]:
    took = PanelOptions(
        title="Snapshots",
        about="How long snapshots took, of all since the job began. Training continues meanwhile, so a slow snapshot "
        "is old when it is complete.",
        unit="s",
        runbook=("AsyncpipeSnapshotTooOld",),
    )
    age = PanelOptions(
        title="Age of the last snapshot",
        about="What would be lost if the job ended now.",
        unit="s",
        runbook=("AsyncpipeSnapshotTooOld",),
    )
    outcomes = PanelOptions(
        title="Snapshots by outcome",
        about="Snapshots within the time range that were written or failed.",
        unit="none",
        decimals=0,
        runbook=("AsyncpipeSnapshotTooOld", "AsyncpipeObserverFailing"),
        names=OUTCOMES,
    )
    durations = [
        Query(quantile(share, "snapshot_duration_seconds", "job", over=series), f"{name} {{{{job}}}}")
        for share, name in (MEDIAN, MOST)
    ]
    made = Query(total("outcome", increase("snapshots_total")), "{{outcome}}")
    shown = (
        (lines(took, *durations), 8),
        (lines(age, Query(_since("last_snapshot"), "{{job}}")), 6),
        (number(outcomes, made, instant=True, named=True), 4),
        (_versions(), 6),
    )
    return (Band(8, shown),)


def _versions() -> Panel:
    options = PanelOptions(
        title="Versions", about="The version of asyncpipe that each job runs.", unit="none", low=None
    )
    return table(options, (Query(f"max by (job, version) ({series('build_info')})"), ()), first=NAMED)


def _quantiles(histogram: str, by: str, legend: str, *shares: Quantile) -> list[Query]:
    return [Query(quantile(share, histogram, by), f"{name} {legend}") for share, name in shares]


def _since(what: str) -> str:
    # A service keeps the metrics of ended and paused jobs for a while; these jobs are not late.
    return (
        f"time() - max by (job) ({series(f'{what}_timestamp_seconds')}\n"
        f"  unless on (instance, job) {series('job_running')} == 0)"
    )


def _lately(metric: str, *matchers: str) -> str:
    return total("job", increase(metric, *matchers))
