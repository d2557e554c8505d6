"""The driver of steps that run in workers: starts the parts of each step, and puts what they tell into one record.

It decides nothing: every worker has a driver and a scheduler of its own, and no tensor and no dependency comes this
way. It is in two places where one controller has to be: a step that fails in one worker is stopped in the others, and
a step is over when all its parts are::

    start ──▶ StartPart to each worker ──▶ PartEnded of each ──▶ record, observers, futures
                          │ the first that failed, a lost worker, or a cancellation
                          └──▶ StopPart to the others

Everything runs on one loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from asyncpipe.core.engine.events import (
    DeviceMemory,
    StepCompleted,
    StepFinished,
    StepNotes,
    StepRecord,
    TaskFailed,
)
from asyncpipe.core.engine.parts_record import WorkerPart, parts_record
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.errors import PipelineClosedError, WorkerLostError
from asyncpipe.runtime.execution import Tenant
from asyncpipe.runtime.part_messages import EndStep, PartEnded, StartPart, StopPart
from asyncpipe.runtime.portal import wait_uncancelled
from asyncpipe.runtime.under_way import raise_for

__all__ = ["PartsDriver", "PartsExecution", "WorkerLink"]


class WorkerLink(Protocol):
    """A worker, as the driver needs it."""

    name: str
    lost: WorkerLostError | None
    """Set when it is gone."""

    def send(self, message: object) -> None:
        """Send a message to it; never blocks. Raises ``WorkerLostError`` if it is gone."""


@dataclass(eq=False, repr=False)
class PartsExecution:
    """One step under way in workers."""

    number: int
    graph: TaskGraph
    tenant: Tenant
    notes: StepNotes
    workers: Mapping[str, WorkerLink]
    """Those that run a part of it, by name."""
    tasks: Mapping[str, frozenset[int]]
    """The tasks of each."""
    started: float
    later: PartsExecution | None = field(default=None, init=False)
    """The step behind this one."""
    ended: dict[str, PartEnded] = field(default_factory=dict, init=False)
    """What the workers have told, by name."""
    aborted: bool = field(default=False, init=False)
    """Whether its workers were told to stop."""
    error: BaseException | None = field(default=None, init=False)
    """Why it cannot be run to its end, if that is no task's fault."""

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.issued: asyncio.Future[StepFinished] = loop.create_future()
        self.done: asyncio.Future[tuple[StepCompleted, StepRecord]] = loop.create_future()

    async def completed(self) -> StepRecord:
        """Wait until every worker is done with the step; raises as ``raise_for``."""
        end, record = await asyncio.shield(self.done)
        self.raise_for(end)
        return record

    def raise_for(self, end: StepFinished | StepCompleted) -> None:
        """Raise what ended the step: ``WorkerLostError``, for instance, or ``TaskError`` if a task failed."""
        if self.error is not None:
            raise self.error
        raise_for(self.graph, end)


class PartsDriver:
    """Runs steps in workers, several at a time. ``Driver`` does the same on threads."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._worker_of: dict[str, WorkerLink] = {}
        """By name of the device."""
        self._executions: dict[int, PartsExecution] = {}
        self._steps = 0
        self._draining = False
        self.is_closed = False
        """Whether ``close`` was called."""

    def add(self, devices: Iterable[str], worker: WorkerLink) -> None:
        """From now on ``worker`` has these devices."""
        for device in devices:
            self._worker_of[device] = worker

    def __contains__(self, device: str) -> bool:
        """Whether a worker has this device."""
        return device in self._worker_of

    @property
    def is_busy(self) -> bool:
        """Whether a step is under way. From any thread."""
        return bool(self._executions)

    def takes(self, tenant: Tenant) -> bool:
        """Whether steps of ``tenant`` may begin. From any thread."""
        return not (self.is_closed or self._draining or tenant.leaving)

    def start(
        self,
        pipeline: int,
        graph: TaskGraph,
        work: Mapping[str, bytes],
        *,
        tenant: Tenant,
        after: PartsExecution | None = None,
    ) -> PartsExecution:
        """Begin one step of ``graph``, behind ``after`` if that is given, which may be under way.

        ``work`` has for each worker what its part computes with. Raises ``PipelineClosedError`` or
        ``WorkerLostError`` before anything runs.
        """
        if not self.takes(tenant):
            raise PipelineClosedError("the pipeline is closed")
        if after is not None and after.aborted:
            raise PipelineClosedError("the step before this one has failed, or was cancelled")
        workers: dict[str, WorkerLink] = {}
        tasks: dict[str, set[int]] = {}
        for task in graph.tasks:
            worker = self._worker_of[task.lane.device]
            workers[worker.name] = worker
            tasks.setdefault(worker.name, set()).add(task.number)
        for worker in workers.values():
            if worker.lost is not None:
                raise worker.lost.while_running(())
        own = {name: frozenset(numbers) for name, numbers in tasks.items()}
        execution = PartsExecution(self._steps, graph, tenant, StepNotes(), workers, own, self._clock())
        self._steps += 1
        self._executions[execution.number] = execution
        follows = None
        if after is not None and after.number in self._executions:
            after.later = execution
            follows = after.number
        for name, worker in workers.items():
            worker.send(StartPart(pipeline, execution.number, follows, work[name]))
        return execution

    async def issued(self, execution: PartsExecution) -> PartsExecution:
        """Wait until all parts of a step have ended.

        Raises as ``PartsExecution.raise_for``. A cancellation takes effect between two tasks. In both cases no worker
        computes for the step any more when this raises.
        """
        try:
            end = await asyncio.shield(execution.issued)
        except asyncio.CancelledError:
            self.cancel(execution)
            await wait_uncancelled(execution.done)
            raise
        execution.raise_for(end)
        return execution

    def cancel(self, execution: PartsExecution) -> None:
        """Stop the step, unless it is over, and those behind it."""
        if execution.number in self._executions:
            self._stop(execution)

    def _stop(self, execution: PartsExecution) -> None:
        following: PartsExecution | None = execution
        while following is not None:
            if not following.aborted:
                following.aborted = True
                _tell(following, StopPart(following.number), [w for w in following.workers if w not in following.ended])
            following = following.later

    def settle(self, execution: PartsExecution, *, keep: bool) -> None:
        """A step has ended: have its workers keep what it has left there, or undo it. From any thread."""
        _tell(execution, EndStep(execution.number, keep), execution.workers)

    async def drain(self, tenant: Tenant | None = None) -> None:
        """Refuse new steps, and wait until those under way are over. With ``tenant``, only its steps."""
        if tenant is None:
            self._draining = True
        else:
            tenant.leaving = True
        while executions := [e for e in self._executions.values() if tenant is None or e.tenant is tenant]:
            await asyncio.wait([execution.done for execution in executions])

    def close(self) -> None:
        """Refuse new steps, and stop those under way."""
        self.is_closed = True
        for execution in tuple(self._executions.values()):
            self._stop(execution)

    # What workers tell

    def part_ended(self, worker: str, part: PartEnded) -> None:
        """``worker`` has ended its part of a step."""
        execution = self._executions.get(part.step)
        if execution is None or worker in execution.ended:
            return
        execution.ended[worker] = part
        if part.error is not None and execution.error is None:
            execution.error = part.error
        if part.error is not None or any(isinstance(event, TaskFailed) for _, event in part.events):
            self._stop(execution)
        if len(execution.ended) == len(execution.workers):
            self._end(execution)

    def worker_lost(self, worker: str, error: WorkerLostError) -> None:
        """``worker`` is gone: end the steps that it has a part of."""
        for execution in tuple(self._executions.values()):
            if worker in execution.workers and worker not in execution.ended:
                self.part_ended(worker, PartEnded(execution.number, (), StepNotes(), error))

    def _end(self, execution: PartsExecution) -> None:
        parts = [WorkerPart(execution.tasks[name], part.events) for name, part in execution.ended.items()]
        record = parts_record(
            execution.number, execution.graph, execution.tenant.share, execution.started, parts, self._clock()
        )
        record = _with_notes(record, [part.notes for part in execution.ended.values()])
        end = next(event for _, event in reversed(record.journal) if isinstance(event, StepCompleted))
        del self._executions[execution.number]
        execution.later = None
        for future, value in (
            (execution.issued, StepFinished(end.step, end.outcome, end.failed_task, end.error)),
            (execution.done, (end, record)),
        ):
            if not future.done():
                future.set_result(value)  # type: ignore[arg-type]
        execution.tenant.observers.show(record)


def _tell(execution: PartsExecution, message: object, names: Iterable[str]) -> None:
    for name in names:
        with suppress(WorkerLostError):  # Whoever waits for it is told elsewhere.
            execution.workers[name].send(message)


def _with_notes(record: StepRecord, notes: Sequence[StepNotes]) -> StepRecord:
    """``record`` with what all workers have noted. Devices of the same name in several workers are added up."""
    memory: dict[str, DeviceMemory] = {}
    streams: dict[str, int] = {}
    for each in notes:
        for device, found in each.memory.items():
            before = memory.get(device)
            memory[device] = found if before is None else _added(before, found)
        for device, count in each.streams.items():
            streams[device] = streams.get(device, 0) + count
    together = StepNotes(
        {task: size for each in notes for task, size in each.copied.items()},
        memory,
        streams,
        sorted(sample for each in notes for sample in each.samples),
        [wakeup for each in notes for wakeup in each.wakeups],
    )
    return replace(record, notes=together)


def _added(one: DeviceMemory, other: DeviceMemory) -> DeviceMemory:
    return DeviceMemory(one.allocated + other.allocated, one.peak + other.peak, max(one.limit, other.limit))
