"""A step under way, as its caller sees it: wherever it runs, it ends twice, and in one of three ways."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol, TypeVar

from asyncpipe.core.engine.events import Outcome, StepCompleted, StepFinished
from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.errors import PipelineClosedError, TaskError

__all__ = ["Drives", "UnderWay", "raise_for", "task_error"]


class UnderWay(Protocol):
    """One step, on the loop of what drives it."""

    number: int
    graph: TaskGraph
    issued: asyncio.Future[StepFinished]
    """Has a result when the last task is issued, or the step is drained after an error or a cancellation."""
    done: asyncio.Future[Any]
    """Has a result when every device is done."""

    def end(self) -> StepCompleted:
        """How it has ended, once it is ``done``. From any thread."""

    def record(self) -> StepRecord:
        """Its record, once it is ``done``. From any thread."""

    async def completed(self) -> StepRecord:
        """Wait until every device is done with the step; raises as ``raise_for``."""

    def raise_for(self, end: StepFinished | StepCompleted) -> None:
        """Raise ``TaskError`` if a task failed, ``PipelineClosedError`` if the step was cancelled."""


_Step = TypeVar("_Step", bound=UnderWay)


class Drives(Protocol[_Step]):
    """What drives steps, on its loop."""

    async def issued(self, execution: _Step) -> _Step:
        """Wait until the last task of a step is issued; raises as ``raise_for``. A cancellation ends the step."""

    def cancel(self, execution: _Step) -> None:
        """Abort the step, unless it is over, and those behind it."""


def raise_for(graph: TaskGraph, end: StepFinished | StepCompleted) -> None:
    """As ``UnderWay.raise_for``, for a step of ``graph``."""
    if end.outcome is Outcome.CANCELLED:
        raise PipelineClosedError("the pipeline was closed during this step")
    if end.outcome is not Outcome.FAILED:
        return
    assert end.failed_task is not None
    assert end.error is not None
    raise task_error(graph.tasks[end.failed_task], end.error)


def task_error(task: Task, error: BaseException) -> TaskError:
    """The error of a step whose ``task`` raised ``error``."""
    return TaskError(task.id, task.kind.value, task.microbatch, task.stage, task.lane.device, error)
