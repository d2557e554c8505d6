"""The driver of steps that run in workers: starts the parts of each step, and puts what they tell into one record.

It decides nothing: every worker has a driver and a scheduler of its own, and no tensor and no dependency comes this
way. It is in two places where one controller has to be: a step that fails in one worker is stopped in the others, and
a step is over when all its parts are. A third one is the watchdog: it sees what runs in each worker (``TaskBoard``),
and asks what each is at where nothing happens (``HangSearch``)::

    start ──▶ StartPart to each worker ──▶ PartEnded of each ──▶ futures, observers
                          │ the first that failed, a lost worker, or a cancellation
                          └──▶ StopPart to the others

Everything runs on one loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from asyncpipe.core.engine.events import Outcome, StepCompleted, StepFinished, TaskCompleted, TaskFailed
from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.policies.jobs import JobAccount
from asyncpipe.core.records.clocks import EdgePassage, agreed_shifts
from asyncpipe.core.records.compilations import Compilation
from asyncpipe.core.records.parts_record import WorkerPart, parts_record
from asyncpipe.core.records.step_notes import DeviceMemory, StepNotes
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.records.worker_notes import WorkerChange, WorkerNotes, WorkerState
from asyncpipe.errors import EdgeError, HangError, PipelineClosedError, WorkerLostError
from asyncpipe.runtime.execution import Tenant
from asyncpipe.runtime.hang_search import HangSearch, Suspect
from asyncpipe.runtime.part_messages import EndStep, PartEnded, StartPart, StopPart, on_clock
from asyncpipe.runtime.portal import wait_uncancelled
from asyncpipe.runtime.task_board import ShownTask
from asyncpipe.runtime.under_way import raise_for

__all__ = ["LOSS_SECONDS", "PartsDriver", "PartsExecution", "PlacedPipeline", "WorkerLink"]

LOSS_SECONDS = 1.0
"""For a worker to be known as lost, when an edge to it broke."""


class WorkerLink(Protocol):
    """A worker, as the driver needs it."""

    name: str
    lost: WorkerLostError | None
    """Set when it is gone."""

    @property
    def pid(self) -> int:
        """The number of its process."""

    @property
    def silent_seconds(self) -> float:
        """How long nothing has come from it. It is asked for a sign of life all the time."""

    @property
    def round_trip(self) -> float:
        """Seconds of the shortest of the last messages to it and back."""

    @property
    def clock_offset(self) -> float:
        """Seconds to take off its times to have this process's."""

    @property
    def clock_error(self) -> float:
        """How far they may be off then, in seconds."""

    def send(self, message: object) -> None:
        """Send a message to it; never blocks. Raises ``WorkerLostError`` if it is gone."""

    def running(self) -> Sequence[ShownTask]:
        """The tasks that run there, or ran when it ended, in numbers of its part of their step. From any thread."""

    async def query(self, question: Any) -> Any:
        """The answer of the thread there that answers pings. Raises ``WorkerLostError`` if the worker is gone."""

    def kill(self, why: str, *, stacks: bool = False) -> None:
        """End it, after a moment in which it writes down ``stacks``; it is lost then. From any thread."""


class PlacedPipeline:
    """A pipeline whose stages are in workers. If one of these is lost, the pipeline cannot be used any more."""

    def __init__(self, number: int, tenant: Tenant, workers: Mapping[str, WorkerLink]) -> None:
        """``workers`` by name of the device. A worker that takes the place of a lost one knows nothing of it."""
        self.number = number
        self.tenant = tenant
        self.workers = workers
        self.times = JobAccount(tenant.share.job, True, tenant.share)
        """How long its tasks take."""
        self.compilations: list[Compilation] = []
        """What was compiled of its stages."""
        self.broken: EdgeError | None = None
        """Set when an edge between two of its workers broke that are there: nothing passes there any more."""
        self.broken_edges: list[tuple[str, str] | tuple[int, int]] = []
        """All that broke."""

    def tell(self, worker: WorkerLink, *, is_restart: bool = False) -> None:
        """Tell the pipeline's observers what has become of ``worker``."""
        state, how = (WorkerState.UP, "") if worker.lost is None else (WorkerState.LOST, worker.lost.how)
        devices = tuple(device for device, other in self.workers.items() if other is worker)
        change = WorkerChange(worker.name, state, worker.pid, devices, is_restart, how)
        self.tenant.observers.worker_changed(change)


@dataclass(eq=False, repr=False)
class PartsExecution:
    """One step under way in workers."""

    number: int
    graph: TaskGraph
    pipeline: PlacedPipeline
    notes: StepNotes
    workers: Mapping[str, WorkerLink]
    """Those that run a part of it, by name."""
    tasks: Mapping[str, Sequence[int]]
    """The tasks of each, in the order of their numbers in its part."""
    started: float
    follows: int | None
    """The number of the step that was under way when it began behind it."""
    later: PartsExecution | None = field(default=None, init=False)
    """The step behind this one."""
    ended: dict[str, PartEnded] = field(default_factory=dict, init=False)
    """What the workers have told, by name."""
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)
    """How many seconds were taken off their times, and how far these may be off."""
    aborted: bool = field(default=False, init=False)
    """Whether its workers were told to stop."""
    error: BaseException | None = field(default=None, init=False)
    """Why it cannot be run to its end, if that is no task's fault."""

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.issued: asyncio.Future[StepFinished] = loop.create_future()
        self.done: asyncio.Future[StepCompleted] = loop.create_future()
        self._made = threading.Lock()
        self._record: StepRecord | None = None
        self._over = 0.0

    @property
    def tenant(self) -> Tenant:
        """Whose step it is."""
        return self.pipeline.tenant

    async def completed(self) -> StepRecord:
        """Wait until every worker is done with the step; raises as ``raise_for``."""
        self.raise_for(await asyncio.shield(self.done))
        return self.record()

    def end(self) -> StepCompleted:
        """How it has ended, once it is ``done``. From any thread."""
        return self.done.result()

    def record(self) -> StepRecord:
        """Its record, once it is ``done``. From any thread. It is made when somebody asks for it."""
        with self._made:
            if self._record is None:
                self._agree()
                parts = [WorkerPart(frozenset(self.tasks[name]), part.events) for name, part in self.ended.items()]
                share = self.tenant.share
                record = parts_record(
                    self.number, self.graph, share, self.started, parts, self._over, self.error, after=self.follows
                )
                self._record = replace(record, notes=_notes(self))
            return self._record

    def _agree(self) -> None:
        """Have the times of workers on several machines agree with the messages between them."""
        crossings = []
        for name, part in self.ended.items():
            for (task, _), left in part.notes.left.items():
                receiver = self.pipeline.workers[self.graph.tasks[task].lane.device].name
                arrived = self.ended[receiver].notes.arrived.get(task) if receiver in self.ended else None
                if arrived is not None:
                    crossings.append(EdgePassage(name, left, receiver, arrived))
        if not crossings:
            return
        shifts = agreed_shifts({name: error for name, (_, error) in self.clocks.items()}, crossings)
        for name, shift in shifts.items():
            offset, error = self.clocks[name]
            self.clocks[name] = offset - shift, error
            self.ended[name] = on_clock(self.ended[name], -shift)

    def finish(self, now: float) -> StepCompleted:
        """All its parts have ended: how it has."""
        self._over = now
        tasks = Counter(type(event) for part in self.ended.values() for _, event in part.events)
        if self.error is None and not tasks[TaskFailed] and tasks[TaskCompleted] == len(self.graph.tasks):
            return StepCompleted(self.number, Outcome.OK)
        return next(event for _, event in reversed(self.record().journal) if isinstance(event, StepCompleted))

    def raise_for(self, end: StepFinished | StepCompleted) -> None:
        """Raise what ended the step: ``WorkerLostError``, for instance, or ``TaskError`` if a task failed."""
        if self.error is not None:
            raise self.error
        raise_for(self.graph, end)


class PartsDriver:
    """Runs steps in workers, several at a time. ``Driver`` does the same on threads."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._search = HangSearch(clock, self._tasks_in, self._hung)
        self._pipelines: set[PlacedPipeline] = set()
        """Those whose observers are told of losses."""
        self._executions: dict[int, PartsExecution] = {}
        self._steps = 0
        self._draining = False
        self.is_closed = False
        """Whether ``close`` was called."""

    @property
    def is_busy(self) -> bool:
        """Whether a step is under way. From any thread."""
        return bool(self._executions)

    def takes(self, tenant: Tenant) -> bool:
        """Whether steps of ``tenant`` may begin. From any thread."""
        return not (self.is_closed or self._draining or tenant.leaving)

    def place(self, pipeline: PlacedPipeline, restarted: Collection[str]) -> None:
        """A pipeline is loaded; of its workers, those that are ``restarted`` have taken the places of lost ones."""
        self._pipelines.add(pipeline)
        for worker in dict.fromkeys(pipeline.workers.values()):
            pipeline.tell(worker, is_restart=worker.name in restarted)

    def forget(self, pipeline: PlacedPipeline) -> None:
        """It is unloaded."""
        self._pipelines.discard(pipeline)

    def start(
        self,
        pipeline: PlacedPipeline,
        graph: TaskGraph,
        work: Mapping[str, object],
        *,
        after: PartsExecution | None = None,
    ) -> PartsExecution:
        """Begin one step of ``graph``, behind ``after`` if that is given, which may be under way.

        ``work`` has for each worker what its part computes with. Raises ``PipelineClosedError`` or
        ``WorkerLostError`` before anything runs.
        """
        if not self.takes(pipeline.tenant):
            raise PipelineClosedError("the pipeline is closed")
        if after is not None and after.aborted:
            raise PipelineClosedError("the step before this one has failed, or was cancelled")
        workers: dict[str, WorkerLink] = {}
        tasks: dict[str, list[int]] = {}
        for task in graph.tasks:
            worker = pipeline.workers[task.lane.device]
            workers[worker.name] = worker
            tasks.setdefault(worker.name, []).append(task.number)
        for worker in workers.values():
            if worker.lost is not None:
                raise worker.lost.while_running(())
        if pipeline.broken is not None:
            raise copy(pipeline.broken)
        follows = after.number if after is not None and after.number in self._executions else None
        execution = PartsExecution(self._steps, graph, pipeline, StepNotes(), workers, tasks, self._clock(), follows)
        self._steps += 1
        self._executions[execution.number] = execution
        self._search.begin(execution)
        if after is not None and follows is not None:
            after.later = execution
        for name, worker in workers.items():
            worker.send(StartPart(pipeline.number, execution.number, follows, work[name]))
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
        self._search.moved(part.step)
        link = execution.workers[worker]
        execution.clocks[worker] = link.clock_offset, link.clock_error
        execution.ended[worker] = part = on_clock(part, link.clock_offset)
        if part.error is not None and execution.error is None:
            execution.error = part.error
        if part.error is not None or any(isinstance(event, TaskFailed) for _, event in part.events):
            self._stop(execution)
        if len(execution.ended) == len(execution.workers):
            self._end(execution)

    def worker_lost(self, worker: WorkerLink, error: WorkerLostError) -> None:
        """``worker`` is gone: end the steps that it has a part of."""
        hang = self._search.lost(worker)
        for pipeline in self._pipelines:
            if worker in pipeline.workers.values():
                pipeline.tell(worker)
        ran = self._tasks_in(worker)
        for execution in tuple(self._executions.values()):
            if execution.workers.get(worker.name) is worker and worker.name not in execution.ended:
                found = error.while_running([_named(execution, other, task) for other, task, _ in ran], hang)
                self.part_ended(worker.name, PartEnded(execution.number, (), StepNotes(), found))

    def edge_broken(self, pipeline: int, error: EdgeError) -> None:
        """An edge of ``pipeline`` broke, at one of its ends: end its steps, unless a worker turns out to be lost."""
        loop = asyncio.get_running_loop()
        placed = next((each for each in self._pipelines if each.number == pipeline), None)
        if placed is not None and placed.broken is None and error.edge is not None:
            placed.broken_edges.append(error.edge)
            ends = [worker for worker in set(placed.workers.values()) if worker.name in error.edge]
            loop.call_later(LOSS_SECONDS, self._judge, placed, ends, error)

    def _judge(self, pipeline: PlacedPipeline, ends: Sequence[WorkerLink], error: EdgeError) -> None:
        """An edge broke a while ago; a worker that does not answer since is about to be lost, or will answer."""
        if pipeline not in self._pipelines or pipeline.broken is not None:
            return
        if any(worker.lost is not None for worker in ends):
            return
        if any(worker.silent_seconds > LOSS_SECONDS for worker in ends):
            asyncio.get_running_loop().call_later(LOSS_SECONDS, self._judge, pipeline, ends, error)
            return
        error.edges = tuple(dict.fromkeys(pipeline.broken_edges))
        pipeline.broken = error
        for execution in tuple(self._executions.values()):
            if execution.pipeline is pipeline:
                execution.error = execution.error or error
                self._stop(execution)

    # For the watchdog

    def running(self) -> Sequence[Suspect]:
        """What runs in workers, the workers that are silent, and the steps that stand still. From any thread."""
        return self._search.suspects()

    def _hung(self, execution: PartsExecution, error: HangError) -> None:
        """No worker is to blame, but the step cannot go on."""
        execution.error = execution.error or error
        self._stop(execution)

    def _tasks_in(self, worker: WorkerLink) -> list[tuple[PartsExecution, Task, float]]:
        """What runs in a worker, or ran when it ended, and since when."""
        found = []
        for step, number, started in worker.running():
            # Of a step that has failed elsewhere, a task may run on for a moment.
            if (execution := self._executions.get(step)) is not None and worker.name in execution.tasks:
                found.append((execution, execution.graph.tasks[execution.tasks[worker.name][number]], started))
        return found

    def _end(self, execution: PartsExecution) -> None:
        end = execution.finish(self._clock())
        del self._executions[execution.number]
        self._search.end(execution.number)
        execution.later = None
        for future, value in (
            (execution.issued, StepFinished(end.step, end.outcome, end.failed_task, end.error)),
            (execution.done, end),
        ):
            if not future.done():
                future.set_result(value)  # type: ignore[arg-type]
        for part in execution.ended.values():
            execution.pipeline.compilations += part.notes.compilations
            for _, event in part.events:
                if isinstance(event, TaskCompleted):
                    execution.pipeline.times.measured(execution.graph.tasks[event.task], event.ended - event.started)
        if (observers := execution.tenant.observers).shown:
            observers.show(execution.record())


def _named(execution: PartsExecution, other: PartsExecution, task: Task) -> str:
    """What ``task`` of a step is called where ``execution`` fails."""
    whose = ""
    if other.pipeline is not execution.pipeline:
        whose = f" of job {job!r}" if (job := other.tenant.share.job) else " of another pipeline"
    return f"{task.id} on {task.lane.device}{whose}"


def _tell(execution: PartsExecution, message: object, names: Iterable[str]) -> None:
    for name in names:
        with suppress(WorkerLostError):  # Whoever waits for it is told elsewhere.
            execution.workers[name].send(message)


def _notes(execution: PartsExecution) -> StepNotes:
    """What all workers have noted. Devices of the same name in several workers are added up."""
    notes = {name: part.notes for name, part in execution.ended.items()}
    memory: dict[str, DeviceMemory] = {}
    streams: dict[str, int] = {}
    for each in notes.values():
        for device, found in each.memory.items():
            before = memory.get(device)
            memory[device] = found if before is None else _added(before, found)
        for device, count in each.streams.items():
            streams[device] = streams.get(device, 0) + count
    return StepNotes(
        {task: size for each in notes.values() for task, size in each.copied.items()},
        memory,
        streams,
        list(_samples(notes)),
        [wakeup for each in notes.values() for wakeup in each.wakeups],
        {task: at for each in notes.values() for task, at in each.arrived.items()},
        {key: at for each in notes.values() for key, at in each.left.items()},
        {name: _worker_notes(execution, worker) for name, worker in execution.workers.items()},
        {stage for each in notes.values() for stage in each.drew},
        [compilation for each in notes.values() for compilation in each.compilations],
        {lane: account for each in notes.values() for lane, account in each.taken.items()},
    )


def _samples(notes: Mapping[str, StepNotes]) -> Iterator[tuple[float, str, int]]:
    """Samples of all workers: each is what all of them together hold of a device then, as far as they have told."""
    held: dict[str, dict[str, int]] = {}
    for at, device, worker, size in sorted(
        (at, device, worker, size) for worker, each in notes.items() for at, device, size in each.samples
    ):
        of_workers = held.setdefault(device, {})
        of_workers[worker] = size
        yield at, device, sum(of_workers.values())


def _worker_notes(execution: PartsExecution, worker: WorkerLink) -> WorkerNotes:
    return WorkerNotes(
        state=WorkerState.UP if worker.lost is None else WorkerState.LOST,
        pid=worker.pid,
        devices=tuple(device for device, other in execution.pipeline.workers.items() if other is worker),
        round_trip=worker.round_trip,
        clock_offset=execution.clocks[worker.name][0],
        clock_error=execution.clocks[worker.name][1],
        use=execution.ended[worker.name].use,
    )


def _added(one: DeviceMemory, other: DeviceMemory) -> DeviceMemory:
    return DeviceMemory(one.allocated + other.allocated, one.peak + other.peak, max(one.limit, other.limit))
