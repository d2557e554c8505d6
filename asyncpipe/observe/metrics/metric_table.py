"""The table of the metrics of a job: names without the prefix ``asyncpipe_``, help texts and labels.

A new metric takes a row here and the line that adds to it: in ``fold.py`` if it comes from steps, in ``collector.py``
if the training loop or a worker's end reports it. The collector and the dashboards read the table. What needs more than
a line of help is below the table.
"""

from __future__ import annotations

__all__ = ["COUNTERS", "GAUGES", "HISTOGRAMS", "Labels"]

Labels = tuple[str, ...]
"""Names of labels, or their values; the label ``job``, which every metric has, is left out."""

COUNTERS: dict[str, tuple[str, Labels]] = {
    "steps": ("Steps by outcome (ok, failed, cancelled); a pipe(x) and its backward count as one each.", ("outcome",)),
    "tasks": ("Tasks by kind (F, R, B, C ...) and outcome (completed, failed, dropped).", ("kind", "outcome")),
    "stage_busy_seconds": ("Seconds that a device computed for a stage.", ("stage", "device")),
    "stage_idle_seconds": (
        "Idle seconds before tasks of a stage, by reason.",
        ("stage", "device", "reason"),
    ),
    "executor_busy_seconds": ("Seconds that a device's host thread ran tasks, or queued them on CUDA.", ("device",)),
    "copy_bytes": ("Bytes copied between logical devices, or between a device and the host.", ("src", "dst")),
    "copy_seconds": ("Seconds that copies between logical devices, or to and from the host, took.", ("src", "dst")),
    "edge_messages": ("Messages that one worker sent to another.", ("src", "dst")),
    "edge_bytes": ("Bytes of tensors that one worker sent to another.", ("src", "dst")),
    "edge_waiting_seconds": ("Seconds that messages of one worker waited for credit of another.", ("src", "dst")),
    "compilations": ("Compilations of stages by reason (first, again, eager).", ("stage", "reason")),
    "compile_seconds": ("Seconds that compiling stages took; no part of what their tasks take.", ("stage",)),
    "graph_breaks": ("Places where a compiled stage was not one graph, seen when it was compiled.", ("stage",)),
    "worker_losses": ("Workers that were lost: they ended, were killed, or did not answer.", ("worker",)),
    "worker_restarts": ("Workers that were started in the place of a lost one.", ("worker",)),
    "samples": ("Training samples consumed.", ()),
    "tokens": ("Training tokens consumed.", ()),
    "training_seconds": ("Seconds of training steps, optimizer and data included.", ()),
    "observer_failures": ("Failures of observers by reason (raised, slow, dropped, trace, snapshot).", ("reason",)),
    "snapshots": ("Snapshots by outcome (ok, failed).", ("outcome",)),
}
"""(help, labels)

Reasons of ``stage_idle_seconds`` are those of ``IdleReason``. ``copy_bytes`` counts tensors between CPU devices, too,
which are handed over and not moved. A message waits for credit while its receiver holds as many as it may. A stage is
compiled *again* when sizes, or something else that the compiler took for fixed, have changed; *eager* is 1 once it runs
without the compiler.
"""
GAUGES: dict[str, tuple[str, Labels]] = {
    "ready_tasks": ("Mean number of tasks in the last step that were ready and had not begun.", ("device",)),
    "inflight_microbatches": ("Most micro-batches between forward and backward in the last step.", ("stage",)),
    "bubble_ratio": ("Idle share of the compute lanes in the last step, from 0 to 1.", ()),
    "ideal_bubble_ratio": ("Bubble of the last step's task graph with equal stages and free copies.", ()),
    "loss": ("Loss of the last training step.", ()),
    "gradient_norm": ("Norm of all gradients of the last step together, before clipping.", ()),
    "mfu": ("Model FLOPs of the last step, as a share of what its devices could compute meanwhile.", ()),
    "stage_memory_bytes": ("Most bytes ever used of the physical device that a stage is on.", ("stage",)),
    "memory_allocated_bytes": ("Bytes of a physical device in use by this process after the last step.", ("device",)),
    "memory_peak_bytes": ("Most bytes of a physical device that this process ever used.", ("device",)),
    "memory_limit_bytes": ("Bytes of a physical device that this process may use.", ("device",)),
    "streams": ("Streams of a physical device that this process uses, in all its jobs; 0 for the CPU.", ("device",)),
    "worker_up": ("1 if a worker is up, 0 if it was lost and no other has taken its place.", ("worker",)),
    "worker_resident_bytes": ("Resident memory of a worker's process after the last step.", ("worker",)),
    "worker_round_trip_seconds": ("Seconds of the shortest of the last pings to a worker and back.", ("worker",)),
    "worker_clock_offset_seconds": ("Seconds by which a worker's clock is ahead of the controller's.", ("worker",)),
    "last_step_timestamp_seconds": ("Unix time at which the last step ended.", ()),
    "last_snapshot_timestamp_seconds": ("Unix time at which the last snapshot was taken.", ()),
}
"""(help, labels)

In the ideal bubble F, R, I and W take one unit each and B two; graphs of more than 50000 tasks have none.
"""
HISTOGRAMS: dict[str, tuple[str, Labels, range]] = {
    "step_duration_seconds": ("Seconds from the begin of a step to its last task's end.", (), range(-10, 11)),
    "task_duration_seconds": ("Seconds that tasks ran.", ("stage", "kind"), range(-17, 5)),
    "task_queue_seconds": ("Seconds from a task's last input to its start.", ("device",), range(-17, 3)),
    "scheduler_loop_lag_seconds": ("Seconds by which the event loop ran a scheduler wake-up late.", (), range(-20, 3)),
    "scheduler_dispatch_seconds": ("Seconds that the scheduler took in a wake-up.", (), range(-20, 3)),
    "snapshot_duration_seconds": ("Seconds that snapshots took.", (), range(-7, 11)),
}
"""(help, labels, the exponents of two that bound the buckets); 2**-17 s is 7.6 µs.

A step begins with its submission; one that follows another begins with its first task.
"""
