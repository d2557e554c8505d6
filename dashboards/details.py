"""The lower half of the dashboard *Pipeline*: tasks, steps and devices, one function for each section."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Panel

from asyncpipe.core.kinds import COMPUTE_KINDS, TaskKind
from dashboards.board import Band
from dashboards.panels import PanelOptions, Query, heat, lines
from dashboards.queries import mean, quantile, rate, series, total

__all__ = ["devices", "steps", "tasks"]

KINDS = ", ".join(f"{kind.value} {kind.word}" for kind in TaskKind) + "."
CHOSEN = 'kind=~"$kind"'
COMPUTE = f'kind=~"{"|".join(COMPUTE_KINDS)}"'
ACROSS = 3


def tasks() -> tuple[Band, ...]:
    """Durations of tasks by kind, the share of recomputation, and what stages and devices hold."""
    spread = PanelOptions(
        title="Task duration, $kind",
        about=f"How many tasks took how long, over all stages: {KINDS} Two bands mean two kinds of stages, or a "
        "device that is slow at times. Each bucket ends at twice the duration of the one below.",
        unit="s",
        low=None,
    )
    even = PanelOptions(
        title="Task duration",
        about=f"Mean duration by stage and kind (exact, unlike quantiles): {KINDS} Equal stages have equal lines.",
        unit="s",
        runbook=("Unbalanced stages",),
    )
    late = PanelOptions(
        title="Task duration, median and 95th percentile",
        about="By stage and kind, to the precision of the buckets (each ends at twice the one below). A 95th "
        "percentile far above the median means tasks of different length, or a device that other programs use.",
        unit="s",
    )
    by = "job, stage, kind"
    buckets = total("le", f"increase({series('task_duration_seconds_bucket', CHOSEN)}[$__rate_interval])")
    name = "{{kind}} stage {{stage}}"
    quantiles = [
        Query(quantile(at, "task_duration_seconds", by, CHOSEN), f"{called} {name}")
        for at, called in ((0.5, "median"), (0.95, "95 %"))
    ]
    means = Query(mean("task_duration_seconds", by, CHOSEN), name)
    return (
        Band(8, ((heat(spread, Query(buckets, "{{le}}"), "kind", ACROSS), 24),)),
        Band(9, ((lines(even, means, beside=True), 12), (lines(late, *quantiles, beside=True), 12))),
        Band(8, _held()),
    )


def _held() -> tuple[tuple[Panel, int], ...]:
    recompute = PanelOptions(
        title="Recompute share",
        about="Share of the computing time that is spent on repeating forwards in order to save memory.",
        unit="percentunit",
        high=1,
        runbook=("Bubble",),
    )
    spent = total("job", rate("task_duration_seconds_sum", COMPUTE))
    again = total("job", rate("task_duration_seconds_sum", 'kind="R"'))
    # A job without recomputation has no series of kind R; its share is 0.
    part = Query(f"({again} or 0 * {spent})\n  / ({spent} > 0)", "{{job}}")
    inflight = PanelOptions(
        title="In-flight micro-batches",
        about="Most micro-batches that a stage held between forward and backward in the last step: activations in "
        "memory. GPipe holds all of them, 1F1B as many as stages follow.",
        unit="none",
        decimals=0,
        runbook=("AsyncpipeMemoryNearLimit",),
    )
    ready = PanelOptions(
        title="Ready tasks",
        about="How many tasks were ready and waited for their device, on average over the last step. Many: the device "
        "is the bottleneck. None: it waits for others.",
        unit="none",
        runbook=("Waiting for the scheduler",),
    )
    held = Query(f"max by (job, stage) ({series('inflight_microbatches')})", "stage {{stage}}")
    waiting = Query(f"max by (job, device) ({series('ready_tasks')})", "{{device}}")
    return (lines(recompute, part), 8), (lines(inflight, held, held=True), 8), (lines(ready, waiting, held=True), 8)


def steps() -> tuple[Band, ...]:
    """How long steps take, and the throughput."""
    time = PanelOptions(
        title="Step time",
        about="From a step's submission to the end of its last task. The last line includes the optimizer and the "
        "loading of data: if it is far above the mean, time is lost outside the pipeline.",
        unit="s",
        runbook=("AsyncpipeStalled",),
    )
    quantiles = [
        Query(quantile(at, "step_duration_seconds", "job"), f"{called} {{{{job}}}}")
        for at, called in ((0.5, "median"), (0.95, "95 %"), (0.99, "99 %"))
    ]
    counted = total("job", rate("training_seconds_total")), total("job", rate("step_duration_seconds_count"))
    whole = Query(f"{counted[0]}\n  / ({counted[1]} > 0)", "with optimizer and data {{job}}")
    samples = PanelOptions(
        title="Samples per second", about="Training samples consumed per second.", unit="si:samples/s"
    )
    tokens = PanelOptions(title="Token throughput", about="Training tokens consumed per second.", unit="si:tok/s")
    return (
        Band(
            8,
            (
                (lines(time, Query(mean("step_duration_seconds", "job"), "mean {{job}}"), *quantiles, whole), 12),
                (lines(samples, Query(total("job", rate("samples_total")), "{{job}}")), 6),
                (lines(tokens, Query(total("job", rate("tokens_total")), "{{job}}")), 6),
            ),
        ),
        _limits(),
        _compilations(),
    )


def _limits() -> Band:
    """How close a step is to what the model and the devices can bear."""
    norm = PanelOptions(
        title="Gradient norm",
        about="Norm of all gradients together, before clipping. One that grows comes before a loss that does.",
        unit="none",
    )
    mfu = PanelOptions(
        title="MFU",
        about="Model FLOPs utilization: what the model needs, without recomputation, as a share of what the devices "
        "could compute in the time of a step.",
        unit="percentunit",
        high=1,
    )
    memory = PanelOptions(
        title="Memory of stages",
        about="The most that was ever used of the physical device that a stage is on, by all that is there.",
        unit="bytes",
        runbook=("AsyncpipeMemoryNearLimit",),
    )
    by_stage = "stage_memory_bytes", "job, stage", "stage {{stage}}"
    return Band(8, ((_figure(norm, "gradient_norm"), 8), (_figure(mfu, "mfu"), 8), (_figure(memory, *by_stage), 8)))


def _compilations() -> Band:
    compiled = PanelOptions(
        title="Compilations",
        about="Of stages (compile=True), by reason: first, again (sizes, or something else that the compiler took for "
        "fixed, have changed; a line that goes on means that each step compiles), eager (a stage runs without the "
        "compiler). Compiling counts for no task.",
        unit="none",
        decimals=0,
    )
    spent = PanelOptions(title="Compile time", about="Seconds that compiling a stage took, in all.", unit="s")
    by_reason = Query(total("job, stage, reason", series("compilations_total")), "stage {{stage}}, {{reason}}")
    seconds = Query(total("job, stage", series("compile_seconds_total")), "stage {{stage}}")
    breaks = Query(total("job, stage", series("graph_breaks_total")), "stage {{stage}}, graph breaks")
    return Band(8, ((lines(compiled, by_reason, breaks), 12), (lines(spent, seconds), 12)))


def _figure(options: PanelOptions, metric: str, by: str = "job", name: str = "{{job}}") -> Panel:
    """A figure of each job's last step."""
    return lines(options, Query(f"max by ({by}) ({series(metric)})", name), held=True)


def devices() -> tuple[Band, ...]:
    """Copies, memory, streams, and the threads that drive the devices."""
    way = "job, src, dst"
    bytes_copied = PanelOptions(
        title="Copies",
        about="Bytes per second from one device to another. Between CPU devices tensors are handed over without "
        "copying, and are counted too. All pairs of neighbouring stages should have similar lines.",
        unit="binBps",
        runbook=("Waiting for a copy",),
    )
    busy = PanelOptions(
        title="Copy time",
        about="Seconds per second that copies between two devices took. Near 1 the path is saturated, and the "
        "receiving device waits.",
        unit="percentunit",
        runbook=("Waiting for a copy",),
    )
    name = "{{src}} → {{dst}}"
    return (
        Band(
            8,
            (
                (lines(bytes_copied, Query(total(way, rate("copy_bytes_total")), name), beside=True), 12),
                (lines(busy, Query(total(way, rate("copy_seconds_total")), name), beside=True), 12),
            ),
        ),
        Band(8, ((_memory(), 12), (_streams(), 4), (_executors(), 8))),
    )


def _memory() -> Panel:
    options = PanelOptions(
        title="Memory",
        about="Memory of physical devices, as the process sees it after each step: in use, the most ever used, and "
        "the limit. Jobs of one process share them.",
        unit="bytes",
        runbook=("AsyncpipeMemoryNearLimit",),
        names=(("/^limit/", (("custom.lineStyle", {"fill": "dash", "dash": [8, 6]}), ("custom.fillOpacity", 0))),),
    )
    queries = [
        Query(f"max by (device) ({series(f'memory_{metric}_bytes')})", f"{called} {{{{device}}}}")
        for metric, called in (("allocated", "in use"), ("peak", "peak"), ("limit", "limit"))
    ]
    return lines(options, *queries, beside=True)


def _streams() -> Panel:
    options = PanelOptions(
        title="Streams",
        about="Streams of physical devices that the process uses, in all its jobs; none of a CPU. If there are more "
        "than hardware queues (`CUDA_DEVICE_MAX_CONNECTIONS`, 8 unless set), some streams wait for one another.",
        unit="none",
        decimals=0,
    )
    return lines(options, Query(f"max by (device) ({series('streams')})", "{{device}}"), held=True)


def _executors() -> Panel:
    options = PanelOptions(
        title="Executor busy",
        about="Share of its time that each device's host thread spends on tasks: running them on a CPU, queueing them "
        "on CUDA. On CUDA a value near 1 means that the host slows the device down. On CPUs the sum cannot exceed the "
        "free cores.",
        unit="percentunit",
        runbook=("Waiting for the scheduler",),
    )
    query = Query(total("job, device", rate("executor_busy_seconds_total")), "{{device}}")
    return lines(options, query, beside=True)
