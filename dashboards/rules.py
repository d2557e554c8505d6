"""Recording rules and alerts as data, and the file that Prometheus reads.

Recording rules are named ``level:metric:operation``; the level names the labels besides the job::

    counters ──▶ device:asyncpipe_step_seconds:rate ──▶ stage:…:ratio ──▶ device:…:ratio ──▶ job:…:ratio
                 (step seconds a second)                (shares of the step time)              │
                                                                    alerts: value > threshold ◀┘

All rules are in one group, in this order, so that each can use the results of those before it. Alerts about a service
come last; they are by ``instance``, since metrics about the service have no label ``job``.

An alert is a value and a threshold instead of one condition, because the value has data also when nothing is wrong: a
test can query it, and a panel can show how far it is from the threshold. ``[WINDOW]`` in an expression stands for the
range of its rates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import indent
from typing import Any

import yaml

from asyncpipe.core.kinds import COMPUTE_KINDS

__all__ = ["ALERTS", "RECORDINGS", "WINDOW", "Alert", "rates_over", "rules_yaml"]

WINDOW = "5m"
"""The range of rates: several scrapes at the usual intervals, and at least a step of jobs with steps of minutes."""
RUNBOOK = "dashboards/RUNBOOK.md"
HEADER = "# Made by `python -m dashboards.build` from dashboards/rules.py; edit that.\n"


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert, which fires when the comparison of ``value`` with ``threshold`` has held for ``hold`` seconds."""

    name: str
    """Also the heading of its entry in the runbook."""
    value: str
    """PromQL that has data also when nothing is wrong."""
    threshold: float
    hold: int
    severity: str
    summary: str
    description: str
    comparison: str = ">"
    labels: dict[str, str] = field(default_factory=dict)
    """Further labels, which distinguish the rules of an alert that has several."""

    @property
    def condition(self) -> str:
        """The condition in PromQL, with the same ``[WINDOW]``."""
        value = self.value
        whole = f"(\n{indent(value, '  ')}\n)" if "\n" in value else f"({value})" if " " in value else value
        return f"{whole} {self.comparison} {self.threshold:g}"

    @property
    def anchor(self) -> str:
        """The address of its entry in the runbook."""
        return f"{RUNBOOK}#{self.name.lower()}"


def rates_over(window: str, expression: str) -> str:
    """``expression`` with its rates over ``window``."""
    return expression.replace("[WINDOW]", f"[{window}]")


def rules_yaml(window: str = WINDOW, hold: float = 1.0) -> str:
    """The rules file for Prometheus, the same for the same arguments.

    ``window`` is the range of all rates. ``hold`` is a factor for how long conditions must hold, which lets tests run
    in seconds.
    """
    rules: list[dict[str, Any]] = [
        {"record": name, "expr": rates_over(window, expression)} for name, expression in RECORDINGS.items()
    ]
    rules += [_alert_rule(alert, window, hold) for alert in ALERTS]
    text = yaml.dump(
        {"groups": [{"name": "asyncpipe", "rules": rules}]},
        Dumper=_Dumper,
        sort_keys=False,
        width=120,
        allow_unicode=True,
    )
    return HEADER + text


def _alert_rule(alert: Alert, window: str, hold: float) -> dict[str, Any]:
    milliseconds = round(alert.hold * hold * 1000)
    rule: dict[str, Any] = {"alert": alert.name, "expr": rates_over(window, alert.condition)}
    if milliseconds:
        rule["for"] = _duration(milliseconds)
    rule["labels"] = {"severity": alert.severity, **alert.labels}
    rule["annotations"] = {"summary": alert.summary, "description": alert.description, "runbook": alert.anchor}
    return rule


def _duration(milliseconds: int) -> str:
    for unit, size in (("m", 60_000), ("s", 1000)):
        if milliseconds % size == 0:
            return f"{milliseconds // size}{unit}"
    return f"{milliseconds}ms"


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines in block style, and indents lists under their keys."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


RECORDINGS = {
    # Seconds of steps per second: 1 if steps follow one another without a pause.
    "device:asyncpipe_step_seconds:rate": """\
sum by (job, device) (rate(asyncpipe_stage_busy_seconds_total[WINDOW]))
+ sum by (job, device) (rate(asyncpipe_stage_idle_seconds_total[WINDOW]))""",
    # Shares of the step time. If no step ended in the window there is no series, instead of 0 / 0.
    "stage:asyncpipe_busy:ratio": """\
sum by (job, stage, device) (rate(asyncpipe_stage_busy_seconds_total[WINDOW]))
/ on (job, device) group_left () (device:asyncpipe_step_seconds:rate > 0)""",
    "stage:asyncpipe_idle:ratio": """\
sum by (job, stage, device, reason) (rate(asyncpipe_stage_idle_seconds_total[WINDOW]))
/ on (job, device) group_left () (device:asyncpipe_step_seconds:rate > 0)""",
    "device:asyncpipe_busy:ratio": "sum by (job, device) (stage:asyncpipe_busy:ratio)",
    "device:asyncpipe_idle:ratio": "sum by (job, device, reason) (stage:asyncpipe_idle:ratio)",
    "job:asyncpipe_bubble:ratio": "1 - avg by (job) (device:asyncpipe_busy:ratio)",
    "job:asyncpipe_bubble_above_ideal:ratio": (
        "job:asyncpipe_bubble:ratio - on (job) max by (job) (asyncpipe_ideal_bubble_ratio)"
    ),
    "job:asyncpipe_imbalance:ratio": (
        "max by (job) (device:asyncpipe_busy:ratio) / avg by (job) (device:asyncpipe_busy:ratio)"
    ),
    # The time for which a device waits for data, less what other causes explain: the schedule's own bubble, a busier
    # device, and waits for edges, copies, other jobs or dispatch on any device, which make other devices wait for data.
    "device:asyncpipe_starved:ratio": """\
device:asyncpipe_idle:ratio{reason="dependency"}
  - on (job) group_left () max by (job) (asyncpipe_ideal_bubble_ratio)
  - on (job) group_left () sum by (job) (
    avg by (job, reason) (device:asyncpipe_idle:ratio{reason=~"copy|dispatch|edge|shared"})
  )
  - on (job, device) group_left () (
    max by (job) (device:asyncpipe_busy:ratio) - on (job) group_right () device:asyncpipe_busy:ratio
  )
or device:asyncpipe_idle:ratio{reason=~"copy|edge"}""",
    # Without the time in which another job had the device: that is its share, and no delay of the scheduler's.
    "job:asyncpipe_dispatch:ratio": 'avg by (job) (device:asyncpipe_idle:ratio{reason="dispatch"})',
    "job:asyncpipe_shared:ratio": 'avg by (job) (device:asyncpipe_idle:ratio{reason="shared"})',
    "job:asyncpipe_recompute:ratio": f"""\
sum by (job) (rate(asyncpipe_task_duration_seconds_sum{{kind="R"}}[WINDOW]))
/ (sum by (job) (rate(asyncpipe_task_duration_seconds_sum{{kind=~"{"|".join(COMPUTE_KINDS)}"}}[WINDOW])) > 0)""",
    "job:asyncpipe_step_duration_seconds:mean": """\
sum by (job) (rate(asyncpipe_step_duration_seconds_sum[WINDOW]))
/ (sum by (job) (rate(asyncpipe_step_duration_seconds_count[WINDOW])) > 0)""",
    "job:asyncpipe_samples:rate": "sum by (job) (rate(asyncpipe_samples_total[WINDOW]))",
    "job:asyncpipe_tokens:rate": "sum by (job) (rate(asyncpipe_tokens_total[WINDOW]))",
    "job:asyncpipe_scheduler_loop_lag_seconds:p99": (
        "histogram_quantile(0.99, sum by (job, le) (rate(asyncpipe_scheduler_loop_lag_seconds_bucket[WINDOW])))"
    ),
    # Jobs of one process share a device's memory; processes do not. On a GPU the peak is inside a step. The peak of the
    # host's memory may have another cause, such as loading data, so the host's present use is compared instead.
    "device:asyncpipe_memory:ratio": """\
max by (instance, device) (
  asyncpipe_memory_peak_bytes{device!="cpu"} or asyncpipe_memory_allocated_bytes{device="cpu"}
)
/ max by (instance, device) (asyncpipe_memory_limit_bytes)""",
}

_RESTING = "unless on (instance, job) asyncpipe_job_running == 0"
"""Excludes jobs that have ended or are paused: a service keeps their metrics for a while, and they are not late."""

_STALLED = f"""\
(time() - max by (job) (
  asyncpipe_last_step_timestamp_seconds {_RESTING}
))
/ on (job) clamp_min(
  10 * sum by (job) (asyncpipe_step_duration_seconds_sum)
    / (sum by (job) (asyncpipe_step_duration_seconds_count) > 0)
  or on (job) 0 * max by (job) (asyncpipe_last_step_timestamp_seconds),
  60
)
or on (job) 2 + 0 * max by (job) (
  asyncpipe_observer_failures_total offset 15m {_RESTING}
)"""
"""The time since the last step, as a multiple of the time that is allowed. The mean duration is that of all steps,
since a stalled job has no step in the window. A job that has run for a while without any step has the value 2."""

_WAITS = (
    'stage {{ with printf "topk(1, stage:asyncpipe_idle:ratio{job=%q,device=%q,reason=%q})" '
    '$labels.job $labels.device $labels.reason | query }}{{ . | first | label "stage" }}{{ end }}'
)
"""Names the stage that waits most. It is no label, because a label that changes would start another alert."""

_READY = """\
min by (instance) (asyncpipe_service_ready)
or on (instance) 0 * max by (instance) (last_over_time(asyncpipe_service_ready[1d]))"""
"""1 or 0; 0 also for a service that was scraped within the last day and is missing now."""

_NONE_BEGINS = """\
sum by (instance) (asyncpipe_jobs{state="queued"})
* on (instance) (sum by (instance) (increase(asyncpipe_job_transitions_total{to="running"}[WINDOW])) == bool 0)"""
"""The number of queued jobs if none has begun within the window. A job's own wait is only known when it begins."""


def _since_end(state: str) -> str:
    """Seconds since jobs became ``state``, by job; of a service without such jobs, since the beginning of Unix time."""
    return f"""\
time() - (
  max by (instance, job) (asyncpipe_job_failure_timestamp_seconds{{state="{state}"}})
  or on (instance) 0 * max by (instance) (asyncpipe_service_ready)
)"""


ALERTS = (
    Alert(
        name="AsyncpipeStalled",
        value=_STALLED,
        threshold=1,
        hold=60,
        severity="critical",
        summary="{{ $labels.job }} completes no steps",
        description="{{ $labels.job }} has completed no step for much longer than its steps take.",
    ),
    Alert(
        name="AsyncpipeStarvedStage",
        value="device:asyncpipe_starved:ratio",
        threshold=0.2,
        hold=300,
        severity="warning",
        summary="{{ $labels.device }} of {{ $labels.job }} waits ({{ $labels.reason }})",
        description=(
            "{{ $labels.device }} waits ({{ $labels.reason }}) for {{ $value | humanizePercentage }} of the step that "
            f"neither the schedule nor unequal stages explain, mostly at {_WAITS}."
        ),
    ),
    Alert(
        name="AsyncpipeUnbalancedStages",
        value="job:asyncpipe_imbalance:ratio",
        threshold=1.5,
        hold=300,
        severity="warning",
        summary="the stages of {{ $labels.job }} are unequal",
        description=(
            'The busiest device, {{ with printf "topk(1, device:asyncpipe_busy:ratio{job=%q})" $labels.job | query }}'
            '{{ . | first | label "device" }}{{ end }}, computes {{ $value | humanize }} times as long as the mean.'
        ),
    ),
    Alert(
        name="AsyncpipeLoopLag",
        value="job:asyncpipe_scheduler_loop_lag_seconds:p99",
        threshold=0.1,
        hold=120,
        severity="warning",
        summary="the event loop of {{ $labels.job }} is blocked",
        description="One in a hundred of the scheduler's wake-ups is {{ $value | humanizeDuration }} late or more.",
        labels={"signal": "lag"},
    ),
    Alert(
        name="AsyncpipeLoopLag",
        value="job:asyncpipe_dispatch:ratio",
        threshold=0.25,
        hold=120,
        severity="warning",
        summary="devices of {{ $labels.job }} wait for the scheduler",
        description=(
            "Devices wait for the scheduler for {{ $value | humanizePercentage }} of the step although tasks are ready."
        ),
        labels={"signal": "dispatch"},
    ),
    Alert(
        name="AsyncpipeTaskFailures",
        value="""\
sum by (job) (
  rate(asyncpipe_tasks_total{outcome="failed"}[WINDOW]) or rate(asyncpipe_steps_total{outcome="failed"}[WINDOW])
)""",
        threshold=0,
        hold=0,
        severity="critical",
        summary="tasks of {{ $labels.job }} fail",
        description="Tasks or steps of {{ $labels.job }} fail; the log names task, stage and device.",
    ),
    Alert(
        name="AsyncpipeMemoryNearLimit",
        value="device:asyncpipe_memory:ratio",
        threshold=0.9,
        hold=60,
        severity="warning",
        summary="{{ $labels.device }} is nearly full",
        description="{{ $labels.device }} has had {{ $value | humanizePercentage }} of its memory in use.",
    ),
    Alert(
        name="AsyncpipeSnapshotTooOld",
        value=f"""\
time() - max by (job) (
  asyncpipe_last_snapshot_timestamp_seconds {_RESTING}
)""",
        threshold=3600,
        hold=60,
        severity="warning",
        summary="{{ $labels.job }} has no recent snapshot",
        description="The last snapshot of {{ $labels.job }} was taken {{ $value | humanizeDuration }} ago.",
    ),
    Alert(
        name="AsyncpipeObserverFailing",
        value="sum by (job, reason) (rate(asyncpipe_observer_failures_total[WINDOW]))",
        threshold=0,
        hold=0,
        severity="warning",
        summary="an observer of {{ $labels.job }} fails ({{ $labels.reason }})",
        description="Training goes on, but an observer of {{ $labels.job }} fails: {{ $labels.reason }}.",
    ),
    # Rare events are counted within the last hour, so that an alert lasts long enough to be noticed. These counts are
    # not integers, because ``increase`` extrapolates a little beyond the samples.
    Alert(
        name="AsyncpipeWorkerLost",
        value="sum by (job, worker) (increase(asyncpipe_worker_losses_total[1h]))",
        threshold=0,
        hold=0,
        severity="critical",
        summary="{{ $labels.job }} has lost worker {{ $labels.worker }}",
        description=(
            "Within the last hour worker {{ $labels.worker }} of {{ $labels.job }} ended, was killed or did not "
            "answer; the log says how, and what ran there."
        ),
    ),
    # About a service. Times are those of its store, so a job that failed while it was not scraped is told of as well.
    Alert(
        name="AsyncpipeJobFailed",
        value=_since_end("failed"),
        comparison="<",
        threshold=3600,
        hold=0,
        severity="critical",
        summary="{{ $labels.job }} has failed",
        description=(
            "Within the last hour {{ $labels.job }} has failed, and it does not go on by itself; `asyncpipe jobs list "
            "--state failed` and `asyncpipe jobs show JOB` say why."
        ),
    ),
    Alert(
        name="AsyncpipeJobQuarantined",
        value=_since_end("quarantined"),
        comparison="<",
        threshold=3600,
        hold=0,
        severity="critical",
        summary="{{ $labels.job }} is quarantined",
        description=(
            "Within the last hour {{ $labels.job }} was set aside: it seems to take the service down, or lacks what it "
            "needs to go on; `asyncpipe jobs show JOB` says what was found."
        ),
    ),
    Alert(
        name="AsyncpipeServiceNotReady",
        value=_READY,
        comparison="<",
        threshold=1,
        hold=300,
        severity="critical",
        summary="the service {{ $labels.instance }} accepts no jobs",
        description="{{ $labels.instance }} has accepted no jobs for five minutes, or cannot be reached.",
    ),
    Alert(
        name="AsyncpipeJobsWaitTooLong",
        value=_NONE_BEGINS,
        threshold=0,
        hold=3600,
        severity="warning",
        summary="jobs of {{ $labels.instance }} wait and none begins",
        description="{{ $value }} jobs of {{ $labels.instance }} wait, and for an hour none has begun.",
    ),
    Alert(
        name="AsyncpipeJobRetries",
        value='sum by (instance) (increase(asyncpipe_job_retries_total{how="snapshot"}[1h]))',
        threshold=2.5,
        hold=0,
        severity="warning",
        summary="jobs of {{ $labels.instance }} fail again and again",
        description=(
            'Jobs of {{ $labels.instance }} went back to their last snapshots {{ $value | printf "%.0f" }} times '
            "within an hour."
        ),
    ),
    Alert(
        name="AsyncpipeHungTasks",
        value="sum by (instance) (increase(asyncpipe_hung_tasks_total[1h]))",
        threshold=0,
        hold=0,
        severity="critical",
        summary="tasks of {{ $labels.instance }} hang",
        description=(
            "Within the last hour a task of {{ $labels.instance }} did not end and was abandoned; the log has the "
            "stacks of all threads."
        ),
    ),
)
