"""One step under way in workers, the pipeline that it is of, and a worker as the controller sees it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from asyncpipe.core.engine.events import Outcome, StepCompleted, TaskCompleted, TaskFailed
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.policies.jobs import JobAccount
from asyncpipe.core.records.clocks import EdgePassage, agreed_shifts
from asyncpipe.core.records.compilations import Compilation
from asyncpipe.core.records.parts_record import WorkerPart, parts_record
from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.records.worker_notes import WorkerChange, WorkerNotes, WorkerState
from asyncpipe.errors import EdgeError, WorkerLostError
from asyncpipe.runtime.part_messages import PartEnded, on_clock
from asyncpipe.runtime.step_abort import StepAbort
from asyncpipe.runtime.step_driver import DrivenStep, Tenant
from asyncpipe.runtime.task_board import ShownTask

__all__ = ["PartsExecution", "PlacedPipeline", "WorkerLink"]


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

    def __init__(
        self,
        number: int,
        tenant: Tenant,
        workers: Mapping[str, WorkerLink],
        others: Mapping[str, Sequence[WorkerLink]] | None = None,
    ) -> None:
        """``workers`` by name of the device. A worker that takes the place of a lost one knows nothing of it.

        ``others``, by name of a worker, run the same parts.
        """
        self.number = number
        self.tenant = tenant
        self.workers = workers
        self.others = others or {}
        self.followers = frozenset(each.name for same in self.others.values() for each in same)
        """The names of all those."""
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


class PartsExecution(DrivenStep):
    """One step under way in workers."""

    def __init__(
        self,
        abort: StepAbort,
        graph: TaskGraph,
        pipeline: PlacedPipeline,
        workers: Mapping[str, WorkerLink],
        tasks: Mapping[str, Sequence[int]],
        started: float,
    ) -> None:
        super().__init__(abort, graph, pipeline.tenant)
        self.pipeline = pipeline
        self.workers = workers
        """Those that run a part of it, by name."""
        self.tasks = tasks
        """The tasks of each, in the order of their numbers in its part."""
        self.started = started
        self.ended: dict[str, PartEnded] = {}
        """What the workers have told, by name."""
        self.clocks: dict[str, tuple[float, float]] = {}
        """How many seconds were taken off their times, and how far these may be off."""
        self._made = threading.Lock()
        self._record: StepRecord | None = None
        self._over = 0.0

    def told(self) -> dict[str, PartEnded]:
        """What the workers have told, once they have ended. Of those that run the same part, one; the first to fail.

        Where a worker failed because another one of its group did, the other one is to blame.
        """
        if not self.pipeline.followers:
            return self.ended
        parts = dict(self.ended)
        failed = [part for part in parts.values() if _fault(part)[0] == 0]
        for name, others in self.pipeline.others.items():
            if name in parts:
                parts[name] = min(parts[name], *(parts.pop(each.name) for each in others), key=_fault)
        if failed or self.error is not None:
            parts = {name: _blameless(part) for name, part in parts.items()}
        return parts

    def record(self) -> StepRecord:
        """Its record, once it is ``done``. From any thread. It is made when somebody asks for it."""
        with self._made:
            if self._record is None:
                self._agree()
                told = self.told()
                parts = [WorkerPart(frozenset(self.tasks[name]), part.events) for name, part in told.items()]
                share = self.tenant.share
                record = parts_record(
                    self.number, self.graph, share, self.started, parts, self._over, self.error, after=self.follows
                )
                workers = {name: _worker_notes(self, worker) for name, worker in self.workers.items()}
                notes = StepNotes.merged({name: part.notes for name, part in told.items()}, workers)
                self._record = replace(record, notes=notes)
            return self._record

    def _agree(self) -> None:
        """Have the times of workers on several machines agree with the messages between them."""
        crossings = []
        for name, part in self.ended.items():
            for (task, _), left in () if name in self.pipeline.followers else part.notes.left.items():
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
        tasks = Counter(type(event) for part in self.told().values() for _, event in part.events)
        if self.error is None and not tasks[TaskFailed] and tasks[TaskCompleted] == len(self.graph.tasks):
            return StepCompleted(self.number, Outcome.OK)
        return next(event for _, event in reversed(self.record().journal) if isinstance(event, StepCompleted))


def _fault(part: PartEnded) -> tuple[int, float]:
    """Whether a task has failed (0), or only since others did (1), or none has, and when."""
    failures = [
        (int(isinstance(event.error, EdgeError)), at) for at, event in part.events if isinstance(event, TaskFailed)
    ]
    return min(failures, default=(2, 0.0))


def _blameless(part: PartEnded) -> PartEnded:
    """``part`` without tasks that failed since others did."""
    kept = [
        (at, each)
        for at, each in part.events
        if not (isinstance(each, TaskFailed) and isinstance(each.error, EdgeError))
    ]
    return part if len(kept) == len(part.events) else replace(part, events=kept)


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
