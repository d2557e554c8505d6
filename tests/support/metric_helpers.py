"""What tests of metrics share: graphs, a failed step, and the value of a series."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from asyncpipe.core.engine.events import (
    Abort,
    Dispatch,
    Outcome,
    StepCompleted,
    StepSubmitted,
    TaskCompleted,
    TaskDropped,
    TaskFailed,
)
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule

__all__ = ["failed", "lowered", "value"]


def lowered(name: str = "gpipe", shape: Shape = Shape(3, 4, 3), checkpoint: str = "never") -> TaskGraph:  # noqa: B008
    return lower(find_schedule(name), shape, checkpoint=CheckpointMode(checkpoint))


def failed(graph: TaskGraph, error: BaseException) -> StepRecord:
    """F(0,0) completed, F(1,0) failed and F(2,0) dropped."""
    first, second, third = (graph.find(TaskKind.FORWARD, i, 0).number for i in range(3))
    journal = [
        (5.0, StepSubmitted(3, graph)),
        *((5.0, Dispatch(3, task)) for task in (first, second, third)),
        (6.0, TaskCompleted(3, first, 5.25, 6.0)),
        (7.0, TaskFailed(3, second, error)),
        (7.0, Abort(3)),
        (7.0, TaskDropped(3, third)),
        (7.0, StepCompleted(3, Outcome.FAILED, second, error)),
    ]
    return StepRecord(3, graph, journal, Outcome.FAILED)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"asyncpipe_{name}", {"job": "demo", **labels})
