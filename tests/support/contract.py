"""The metrics that asyncpipe promises to serve, and a walk through PromQL to see what it asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["CONTRACT", "HISTOGRAMS", "SERVICE", "nodes"]

HISTOGRAMS = {
    "step_duration_seconds": (),
    "task_duration_seconds": ("stage", "kind"),
    "task_queue_seconds": ("device",),
    "scheduler_loop_lag_seconds": (),
    "scheduler_dispatch_seconds": (),
    "snapshot_duration_seconds": (),
    "job_queue_seconds": (),
}
SERVICE = {
    "jobs": ("state",),
    "job_transitions_total": ("to",),
    "job_retries_total": ("how",),
    "job_queue_seconds_bucket": ("le",),
    "job_queue_seconds_sum": (),
    "job_queue_seconds_count": (),
    "service_ready": (),
    "store_commits_total": (),
    "hung_tasks_total": (),
    "job_log_failures_total": (),
    "worker_heartbeat_age_seconds": ("worker",),
    "host_draining": ("host",),
    "user_queued_jobs": ("user",),
    "user_running_devices": ("user",),
}
"""What a service tells of itself; these alone have no label for a job."""
CONTRACT = {
    "steps_total": ("outcome",),
    "tasks_total": ("kind", "outcome"),
    "stage_busy_seconds_total": ("stage", "device"),
    "stage_idle_seconds_total": ("stage", "device", "reason"),
    "executor_busy_seconds_total": ("device",),
    "copy_bytes_total": ("src", "dst"),
    "copy_seconds_total": ("src", "dst"),
    "edge_messages_total": ("src", "dst"),
    "edge_bytes_total": ("src", "dst"),
    "edge_waiting_seconds_total": ("src", "dst"),
    "compilations_total": ("stage", "reason"),
    "compile_seconds_total": ("stage",),
    "graph_breaks_total": ("stage",),
    "worker_losses_total": ("worker",),
    "worker_restarts_total": ("worker",),
    "samples_total": (),
    "tokens_total": (),
    "training_seconds_total": (),
    "observer_failures_total": ("reason",),
    "snapshots_total": ("outcome",),
    "ready_tasks": ("device",),
    "inflight_microbatches": ("stage",),
    "bubble_ratio": (),
    "ideal_bubble_ratio": (),
    "loss": (),
    "gradient_norm": (),
    "mfu": (),
    "stage_memory_bytes": ("stage",),
    "memory_allocated_bytes": ("device",),
    "memory_peak_bytes": ("device",),
    "memory_limit_bytes": ("device",),
    "streams": ("device",),
    "worker_up": ("worker",),
    "worker_resident_bytes": ("worker",),
    "worker_round_trip_seconds": ("worker",),
    "worker_clock_offset_seconds": ("worker",),
    "last_step_timestamp_seconds": (),
    "last_snapshot_timestamp_seconds": (),
    "build_info": ("version",),
    "job_running": (),
    "job_failure_timestamp_seconds": ("state",),
    **{f"{name}_bucket": (*labels, "le") for name, labels in HISTOGRAMS.items()},
    **{f"{name}_{part}": labels for name, labels in HISTOGRAMS.items() for part in ("sum", "count")},
    **SERVICE,
}
"""What dashboards, rules and people's own queries count on: a name that goes, or loses a label, breaks them."""


def nodes(expression: Any) -> Iterator[Any]:
    """Every part of a parsed expression."""
    yield expression
    for name in ("expr", "param", "lhs", "rhs", "vector_selector"):
        part = getattr(expression, name, None)
        if part is not None:
            yield from nodes(part)
    for part in getattr(expression, "args", ()):
        yield from nodes(part)
