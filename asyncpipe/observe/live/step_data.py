"""A step as plain data for the live page: its key figures, and the timeline to draw."""

from __future__ import annotations

from math import isfinite
from typing import Any

from asyncpipe.core.graph.task import WHOLE_STEP
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.predict.idle_reasons import stage_idle
from asyncpipe.core.predict.report import Report, TaskTime
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.observe.pictures.timeline import kinds_of, shade

__all__ = ["MOST_TASKS", "rounded", "step_data", "timeline_data"]

MOST_TASKS = 2_000
"""Tasks of the largest timeline that is drawn. More would be a few pixels each, and slow to draw for the browser."""


def step_data(record: StepRecord, result: Report, ideal: float | None) -> dict[str, Any]:
    """The key figures of a step; ``busy`` and ``idle`` (by reason) are shares of its time, ``ideal`` a bubble."""
    graph = record.graph
    devices = [graph.devices[number] for number in graph.placement]
    stages = [
        {
            "device": device,
            "busy": rounded(busy),
            "idle": {
                reason.value: rounded(seconds / result.seconds if result.seconds else 0.0)
                for reason, seconds in idle.items()
            },
            "in_flight": peak if graph.training else None,
        }
        for device, busy, idle, peak in zip(
            devices, result.stage_utilization, stage_idle(record, result), result.peak_in_flight, strict=True
        )
    ]
    return {
        "number": record.step,
        "schedule": graph.schedule,
        "phase": graph.phase.value,
        "microbatches": graph.shape.microbatches,
        "seconds": rounded(result.seconds),
        "bubble": rounded(result.bubble_ratio),
        "ideal": rounded(ideal),
        "stages": stages,
        "devices": [{"name": name, "busy": rounded(busy)} for name, busy in result.device_utilization.items()],
    }


def timeline_data(graph: TaskGraph, result: Report) -> dict[str, Any]:
    """The timeline of a step, in milliseconds.

    ``tasks`` are [row, start, end, kind, label, stage, micro-batch, source]; copies are in the row of the device that
    they go to. ``colours`` are those of each kind, from the first stage of a device to its last; ``tint`` is the
    position of each stage's colours among them. ``replica`` is how many rows each replica has, 0 if there is one.
    """
    tint = [graph.placement[:stage].count(device) for stage, device in enumerate(graph.placement)]
    shades = max(tint) + 1
    rows = {device: row for row, device in enumerate(graph.devices)}
    kinds = kinds_of(result.tasks)
    drawn = result.tasks if len(result.tasks) <= MOST_TASKS else ()
    return {
        "seconds": rounded(result.seconds),
        "rows": list(graph.devices),
        "replica": graph.rows.devices if len(graph.rows) > 1 else 0,
        "count": len(result.tasks),
        "tasks": [_task(time, rows[time.task.lane.device]) for time in drawn],
        "tint": tint,
        "kinds": {kind.value: kind.word for kind in kinds},
        "colours": {kind.value: [shade(kind, virtual, shades) for virtual in range(shades)] for kind in kinds},
    }


def _task(time: TaskTime, row: int) -> list[Any]:
    task = time.task
    microbatch = None if task.microbatch == WHOLE_STEP else task.microbatch
    times = (round(time.start * 1e3, 4), round(time.end * 1e3, 4))
    return [row, *times, task.kind.value, task.label, task.stage, microbatch, task.source]


def rounded(value: float | None, digits: int = 4) -> float | None:
    """``value`` with as many digits as a page shows; ``None`` if it is not finite, which JSON cannot express."""
    return float(f"{value:.{digits}g}") if value is not None and isfinite(value) else None
