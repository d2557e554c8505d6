"""What both drivers share: which steps are under way, who may begin one, how one is waited for, and their end.

``Driver`` runs steps on threads of this process, ``PartsDriver`` in workers. Each is used on one asyncio loop.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from asyncpipe.core.engine.events import Outcome, StepCompleted, StepFinished
from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.policies.share import Share
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.errors import HungTaskError, PipelineClosedError, TaskError
from asyncpipe.runtime.observers import Observers
from asyncpipe.runtime.portal import wait_uncancelled
from asyncpipe.runtime.step_abort import StepAbort

__all__ = ["DrivenStep", "StepDriver", "Tenant", "task_error"]

CANCEL_SECONDS = 5.0
"""For the tasks that run when their step is cancelled; those that have not ended by then are given up."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Tenant:
    """A user of a driver: one of possibly several pipelines on the same devices."""

    share: Share = field(default_factory=Share)
    """What its steps get of lanes that other tenants use as well."""
    observers: Observers = field(default_factory=Observers)
    """Who gets the records of its steps."""
    why_workers: str = ""
    """For ``StepNotes.why_workers``."""
    is_leaving: bool = field(default=False, init=False)
    """Set for good when the driver drains it: its steps are refused from then on."""
    hung: HungTaskError | None = field(default=None, init=False)
    """A task of it that was given up on a thread, which may still write to its model."""


class DrivenStep(ABC):
    """One step under way, on the loop of its driver: wherever it runs, it ends twice, and in one of three ways."""

    def __init__(self, abort: StepAbort, graph: TaskGraph, tenant: Tenant) -> None:
        loop = asyncio.get_running_loop()
        self.number = abort.number
        self.graph = graph
        self.tenant = tenant
        self.abort = abort
        self.follows: int | None = None
        """The number of the step that it was put behind, if that was under way. Devices begin one after the other, and
        both end early together (``StepAbort.precede``)."""
        self.error: BaseException | None = None
        """Why it cannot be run to its end, if that is no task's fault."""
        self.issued: asyncio.Future[StepFinished] = loop.create_future()
        """Has a result when the last task is issued, or the step is drained after an error or a cancellation.

        Where every task is done when it is issued, as on CPUs, that is when the devices' programs have ended: then
        ``done`` has one, too.
        """
        self.done: asyncio.Future[StepCompleted] = loop.create_future()
        """Has a result when every device is done."""
        self.late: asyncio.TimerHandle | None = None
        """Gives up, after a cancellation, what does not end."""

    def end(self) -> StepCompleted:
        """How it has ended, once it is ``done``. From any thread."""
        return self.done.result()

    @abstractmethod
    def record(self) -> StepRecord:
        """Its record, once it is ``done``. From any thread."""

    async def completed(self) -> StepRecord:
        """Wait until every device is done with the step; raises as ``raise_for``."""
        self.raise_for(await asyncio.shield(self.done))
        return self.record()

    def raise_for(self, end: StepFinished | StepCompleted) -> None:
        """Raise what ended the step: ``WorkerLostError``, for instance, ``TaskError`` if a task failed, or
        ``PipelineClosedError`` if it was cancelled.
        """
        if self.error is not None:
            raise self.error
        if end.outcome is Outcome.CANCELLED:
            raise PipelineClosedError("the pipeline was closed during this step")
        if end.outcome is Outcome.FAILED:
            assert end.failed_task is not None
            assert end.error is not None
            raise task_error(self.graph.tasks[end.failed_task], end.error)


def task_error(task: Task, error: BaseException) -> TaskError:
    """The error of a step whose ``task`` raised ``error``."""
    return TaskError(task.id, task.kind.value, task.microbatch, task.stage, task.lane.device, error)


_Step = TypeVar("_Step", bound=DrivenStep)


class StepDriver(ABC, Generic[_Step]):
    """Runs steps, several at a time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock`` in seconds."""
        self._clock = clock
        self._under_way: dict[int, _Step] = {}
        self._next_number = 0
        self._draining = False
        self.is_closed = False
        """Whether ``close`` was called, by its owner or because the scheduler broke."""

    @property
    def is_busy(self) -> bool:
        """Whether a step is under way. From any thread."""
        return bool(self._under_way)

    def accepts(self, tenant: Tenant) -> bool:
        """Whether steps of ``tenant`` may begin. From any thread."""
        return not (self.is_closed or self._draining or tenant.is_leaving)

    def _check_open(self, tenant: Tenant) -> None:
        if not self.accepts(tenant):
            raise PipelineClosedError("the pipeline is closed")

    def _begin(self, step: _Step, after: _Step | None) -> None:
        """``step`` is under way from now on, and ``follows`` the step ``after`` if that is not over.

        Raises ``PipelineClosedError`` if ``after`` has failed or was cancelled.
        """
        if after is not None and not after.abort.precede(step.abort):
            raise PipelineClosedError("the step before this one has failed, or was cancelled")
        self._next_number = step.number + 1
        self._under_way[step.number] = step
        if after is not None and after.number in self._under_way:
            step.follows = after.number

    def _end(self, step: _Step, end: StepCompleted) -> None:
        """``step`` is over."""
        del self._under_way[step.number]
        step.abort.end()
        if step.late is not None:
            step.late.cancel()
        finished = StepFinished(end.step, end.outcome, end.failed_task, end.error)
        if not step.issued.done():
            step.issued.set_result(finished)
        if not step.done.done():
            step.done.set_result(end)

    async def issued(self, step: _Step) -> _Step:
        """Wait until the last task of a step is issued, on threads, or until all its parts have ended, in workers.

        Raises as ``raise_for`` of the step. A cancellation takes effect between two tasks. In both cases nobody
        computes for the step any more when this raises; a task that has not ended ``CANCEL_SECONDS`` after a
        cancellation is given up, on its thread, or its worker is killed.
        """
        try:
            end = await asyncio.shield(step.issued)
        except asyncio.CancelledError:
            self.cancel(step)
            if step.number in self._under_way and step.late is None:
                step.late = asyncio.get_running_loop().call_later(CANCEL_SECONDS, self._give_up_late, step)
            # No thread may use the step any more, even if the caller is cancelled again meanwhile.
            await wait_uncancelled(step.done)
            raise
        step.raise_for(end)
        return step

    @abstractmethod
    def cancel(self, step: _Step) -> None:
        """Abort the step, unless it is over, and those behind it. On the driver's loop."""

    @abstractmethod
    def _give_up_late(self, step: _Step) -> None:
        """Give up what runs of a step that was cancelled ``CANCEL_SECONDS`` ago."""

    @abstractmethod
    def close(self) -> None:
        """Refuse new steps, and cancel those under way. May be called again."""

    # Of devices in this process

    def open(self) -> None:
        """Start what there is, on the running loop."""

    def leave(self, tenant: Tenant) -> None:
        """End the threads that only ``tenant`` uses, once they are done. From any thread."""

    def join(self) -> None:
        """Wait for the threads, after ``close``."""

    async def drain(self, tenant: Tenant | None = None) -> None:
        """Refuse new steps, and wait until those under way are over. With ``tenant``, only its steps."""
        self._refuse(tenant)
        while steps := self._steps_of(tenant):
            await asyncio.wait([step.done for step in steps])

    def _refuse(self, tenant: Tenant | None) -> None:
        # Otherwise ``drain`` would wait for ever for a caller that begins one step after the other.
        if tenant is None:
            self._draining = True
        else:
            tenant.is_leaving = True

    def _steps_of(self, tenant: Tenant | None) -> list[_Step]:
        return [step for step in self._under_way.values() if tenant is None or step.tenant is tenant]
