"""The dashboard *Pipeline*: which stage holds the pipeline back, and why.

It is read from the top: six numbers, then which devices compute and what the others wait for. Details of tasks, steps
and devices are below (``details.py``), and workers, where there are some (``workers.py``).
"""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

from dashboards.board import Band, Section, board, chosen
from dashboards.details import devices, steps, tasks
from dashboards.panels import PanelOptions, Query, bars, columns, lines, number, state_styles, states
from dashboards.queries import mean, rate, series, total
from dashboards.states import BUSY, ORANGE, STATES, WAITING, dominating_code, in_steps, share, waiting
from dashboards.workers import workers

__all__ = ["UID", "pipeline"]

UID = "asyncpipe-pipeline"
ABOUT = (
    "Which stage holds the pipeline back, and why: waiting for data, for an edge, for a copy, for another job, for the "
    "scheduler, or unbalanced."
)
REASONS = (
    "Waiting for data",
    "Waiting for an edge",
    "Waiting for a copy",
    "Waiting for another job",
    "Waiting for the scheduler",
    "Drain",
)
OF_JOB = " ${__field.labels.job}"
IDEAL = f"max by (job) ({series('ideal_bubble_ratio')})"


def pipeline() -> Dashboard:
    """The dashboard, ready to be written."""
    kind = chosen("kind", "Kind of task", 'label_values(asyncpipe_task_duration_seconds_count{job=~"$job"}, kind)')
    sections = (
        Section("", (_numbers(),)),
        Section("Which stage, and why", _why()),
        Section("Tasks", tasks()),
        Section("Steps", steps()),
        Section("Devices", devices()),
        Section("Workers", workers()),
    )
    return board(UID, "asyncpipe: Pipeline", ABOUT, sections, (kind,))


def _numbers() -> Band:
    step = PanelOptions(title="Mean step time", about="Mean duration of the latest steps.", unit="s")
    tokens = PanelOptions(title="Tokens per second", about="Training tokens consumed per second.", unit="si:tok/s")
    loss = PanelOptions(title="Loss", about="Loss of the last step.", unit="none", low=None, decimals=3)
    return Band(
        4,
        (
            (number(step, Query(mean("step_duration_seconds", "job"), "{{job}}")), 4),
            (number(tokens, Query(total("job", rate("tokens_total")), "{{job}}")), 3),
            (_bubble_and_ideal(), 5),
            (_most_idle_time(), 6),
            (_imbalance(), 3),
            (number(loss, Query(f"max by (job) ({series('loss')})", "{{job}}")), 3),
        ),
    )


def _bubble_and_ideal() -> Panel:
    options = PanelOptions(
        title="Bubble and its ideal",
        about="Idle share of the devices' time in steps, and the share that the schedule would have with equal stages.",
        unit="percentunit",
        high=1,
        decimals=0,
        runbook=("Bubble",),
    )
    return number(options, Query(_bubble(), "measured {{job}}"), Query(IDEAL, "ideal {{job}}"), named=True)


def _most_idle_time() -> Panel:
    options = PanelOptions(
        title="Most idle time",
        about="The reason for which devices wait most, and its share of their time in steps.",
        unit="percentunit",
        high=1,
        decimals=0,
        runbook=REASONS,
        names=state_styles(*WAITING, suffix=OF_JOB),
    )
    return number(options, Query(f"topk by (job) (1, {waiting()})", "{{reason}}"), instant=True, named=True)


def _imbalance() -> Panel:
    options = PanelOptions(
        title="Imbalance",
        about="Busy time of the busiest device divided by the mean: 1 is even. No schedule can compensate for "
        "imbalance.",
        unit="suffix: ×",
        low=1,
        decimals=2,
        steps=((None, "green"), (1.2, ORANGE), (1.5, "red")),
        runbook=("Unbalanced stages",),
    )
    busy = total("job, device", rate("stage_busy_seconds_total"))
    return number(options, Query(f"max by (job) ({busy})\n  / (avg by (job) ({busy}) > 0)", "{{job}}"))


def _why() -> tuple[Band, ...]:
    busy_share = f"{total('job, stage, device', rate('stage_busy_seconds_total'))}\n  / on (job, device) group_left () "
    utilization = Query(busy_share + in_steps("job, device"), "stage {{stage}}, {{device}}")
    use = PanelOptions(
        title="Stage utilization",
        about="Share of its device's time in steps that each stage computes. The longest bar is the stage that the "
        "others wait for. The bars of one device's stages add up to its busy share.",
        unit="percentunit",
        high=1,
        decimals=0,
        runbook=("Unbalanced stages",),
    )
    over_time = PanelOptions(
        title="Stage utilization over time",
        about="The same over time. If one line rises while the others fall, that stage became slow.",
        unit="percentunit",
        high=1,
        runbook=("AsyncpipeUnbalancedStages", "AsyncpipeStarvedStage"),
    )
    timeline = PanelOptions(
        title="State timeline",
        about="The state in which each device spends most of its time. A device that waits for data waits for a busy "
        "one.",
        unit="none",
        runbook=REASONS,
    )
    return (
        Band(9, ((bars(use, utilization, colour=BUSY.colour), 8), (_time_by_reason(), 16))),
        Band(8, ((states(timeline, Query(dominating_code(), "{{device}} {{job}}")), 24),)),
        Band(8, ((lines(over_time, utilization), 8), (_reasons_over_time(), 8), (_against_ideal(), 8))),
    )


def _time_by_reason() -> Panel:
    options = PanelOptions(
        title="Idle time by reason",
        about="How each device spends its time: busy, idle in steps by reason, and between steps (optimizer, data, or "
        "nothing to do). Each job has bars of its own; choose one job to distinguish them.",
        unit="percentunit",
        high=1,
        decimals=0,
        runbook=REASONS,
    )
    return columns(options, "device", *((state.colour, Query(share(state), state.name)) for state in STATES))


def _reasons_over_time() -> Panel:
    options = PanelOptions(
        title="Idle time by reason over time",
        about="Idle shares of the time in steps, over the chosen devices; their sum is the bubble. Every schedule has "
        "some waiting for data and some drain: compare with the ideal in the next panel.",
        unit="percentunit",
        high=1,
        runbook=REASONS,
        names=state_styles(*WAITING, suffix=OF_JOB),
    )
    return lines(options, Query(waiting(), "{{reason}}"), stacked=True)


def _against_ideal() -> Panel:
    options = PanelOptions(
        title="Bubble against the ideal",
        about="Idle share of all devices' time in steps. The ideal is the same schedule with equal stages and free "
        "copies. The panel to the left gives the reasons of a gap; without a gap, the bubble is the schedule's own.",
        unit="percentunit",
        high=1,
        runbook=("Bubble",),
        names=(("/^ideal/", (("custom.lineStyle", {"fill": "dash", "dash": [8, 6]}),)),),
    )
    return lines(
        options,
        Query(_bubble(), "measured {{job}}"),
        Query(f"max by (job) ({series('bubble_ratio')})", "last step {{job}}"),
        Query(IDEAL, "ideal {{job}}"),
    )


def _bubble() -> str:
    return f"1 - {total('job', rate('stage_busy_seconds_total'))}\n  / {in_steps('job')}"
