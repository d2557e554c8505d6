"""One step under way in workers, the pipeline that it is of, and a worker as the controller sees it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, SupportsFloat
from weakref import WeakKeyDictionary, ref

from asyncpipe.core.engine.events import Outcome, StepCompleted, TaskFailed
from asyncpipe.core.graph.part import TaskNames, tasks_by_device
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.policies.jobs import JobAccount
from asyncpipe.core.records.clocks import EdgePassage, agreed_shifts
from asyncpipe.core.records.compilations import Compilation
from asyncpipe.core.records.parts_record import TaskEvent, WorkerPart, parts_record
from asyncpipe.core.records.step_notes import StepNotes, StepSize
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.records.worker_notes import WorkerChange, WorkerNotes, WorkerState
from asyncpipe.errors import EdgeError, WorkerLostError
from asyncpipe.runtime.part_messages import PartEnded, PartJournal
from asyncpipe.runtime.step_abort import StepAbort
from asyncpipe.runtime.step_driver import DrivenStep, Tenant
from asyncpipe.runtime.task_board import ShownTask

__all__ = ["PartsExecution", "PlacedGraph", "PlacedPipeline", "WorkerLink"]


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


class PlacedGraph:
    """A graph of steps in workers. What is known of single tasks is made when somebody looks, once. From any thread."""

    def __init__(
        self, graph: TaskGraph, workers: Mapping[str, WorkerLink], others: Mapping[str, Sequence[WorkerLink]]
    ) -> None:
        """``workers`` by name of the device; ``others`` as for ``PlacedPipeline``."""
        self._graph = ref(graph)
        self._worker_of = {device: workers[device].name for device in graph.devices}
        self._others = others
        used = {graph.placement[stage] for stage in {task.stage for task in graph.tasks}}
        found = [workers[device] for place, device in enumerate(graph.devices) if place in used]
        found += [other for worker in dict.fromkeys(found) for other in others.get(worker.name, ())]
        self.workers = {worker.name: worker for worker in found}
        """Those that run a part of it, by name."""

    @cached_property
    def tasks(self) -> Mapping[str, Sequence[int]]:
        """The tasks of each worker, in the order of their numbers in its part."""
        graph, found = self._alive(), dict[str, list[int]]()
        for device, tasks in zip(graph.devices, tasks_by_device(graph), strict=True):
            found.setdefault(self._worker_of[device], []).extend(tasks)
        return found | {each.name: found[name] for name, same in self._others.items() for each in same}

    @cached_property
    def names(self) -> TaskNames:
        """What workers call the tasks in their messages."""
        return TaskNames(self._alive())

    def _alive(self) -> TaskGraph:
        """The graph. This object belongs to it, and must not keep it."""
        graph = self._graph()
        assert graph is not None
        return graph


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
        groups = [frozenset((first, *(each.name for each in same))) for first, same in self.others.items() if same]
        self.alike = {name: names for names in groups for name in names}
        """By name of a worker, where several run the same parts: the names of these."""
        self.times = JobAccount(tenant.share.job, True, tenant.share)
        """How long its tasks take."""
        self.compilations: list[Compilation] = []
        """What was compiled of its stages."""
        self.broken: EdgeError | None = None
        """Set when an edge between two of its workers broke that are there: nothing passes there any more."""
        self.broken_edges: list[tuple[str, str] | tuple[int, int]] = []
        """All that broke."""
        self._graphs: WeakKeyDictionary[TaskGraph, PlacedGraph] = WeakKeyDictionary()

    def graph(self, graph: TaskGraph) -> PlacedGraph:
        """``graph`` in the workers."""
        if graph not in self._graphs:
            self._graphs[graph] = PlacedGraph(graph, self.workers, self.others)
        return self._graphs[graph]

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
        started: float,
    ) -> None:
        super().__init__(abort, graph, pipeline.tenant)
        self.pipeline = pipeline
        self.placed = pipeline.graph(graph)
        self.workers = self.placed.workers
        """Those that run a part of it, by name."""
        self.started = started
        self.size = StepSize()
        self._norm: SupportsFloat | None = None
        self.ended: dict[str, PartEnded] = {}
        """What the workers have told, by name."""
        self.clocks: dict[str, tuple[float, float]] = {}
        """How many seconds were taken off their times, and how far these may be off."""
        self._made = threading.Lock()
        self._record: StepRecord | None = None
        self._over = 0.0

    def told(self) -> list[str]:
        """Who tells what has happened, once all have ended: of those that run the same part one, the first to fail."""
        leaders = [name for name in self.ended if name not in self.pipeline.followers]
        others = self.pipeline.others
        return [min([name, *(each.name for each in others.get(name, ()))], key=self._fault) for name in leaders]

    def _fault(self, name: str) -> tuple[int, float]:
        """Whether a task of a worker has failed (0), or only since others did (1), or none has, and when."""
        offset, part = self.clocks[name][0], self.ended[name]
        return min(((int(_is_others(event)), at - offset) for at, event in part.failed), default=(2, 0.0))

    def record(self) -> StepRecord:
        """Its record, once it is ``done``. From any thread. It is made when somebody asks for it."""
        with self._made:
            if self._record is None:
                journals = {name: PartJournal.unpacked(self.ended[name].journal) for name in self.told()}
                notes = self._agreed({name: self._notes(name, journal) for name, journal in journals.items()})
                tasks, share = self.placed.tasks, self.tenant.share
                events = {name: self._events(name, journal) for name, journal in journals.items()}
                parts = [WorkerPart(frozenset(tasks[name]), each) for name, each in events.items()]
                record = parts_record(
                    self.number, self.graph, share, self.started, parts, self._over, self.error, after=self.follows
                )
                workers = {name: _worker_notes(self, worker) for name, worker in self.workers.items()}
                merged = StepNotes.merged(notes, workers, self.size, self.tenant.why_workers)
                merged.gradient_norm = self._norm
                self._record = replace(record, notes=merged)
            return self._record

    def note_norm(self, norm: SupportsFloat | None) -> None:
        """Note the norm of all gradients, which is known when the workers' results are there. From any thread."""
        with self._made:
            self._norm = norm
            if self._record is not None:
                self._record.notes.gradient_norm = norm

    def _events(self, name: str, journal: PartJournal) -> list[tuple[float, TaskEvent]]:
        """What became of the tasks of a worker, in numbers of the whole graph and on this process's clock."""
        tasks, (offset, _), failed = self.placed.tasks[name], self.clocks[name], self.ended[name].failed
        if (
            failed
            and self.pipeline.followers
            and (self.error is not None or any(self._fault(each)[0] == 0 for each in self.ended))
        ):
            # Where a worker failed because another one of its group did, the other one is to blame.
            failed = [(at, event) for at, event in failed if not _is_others(event)]
        renumbered = [(at - offset, replace(event, task=tasks[event.task])) for at, event in failed]
        return [*journal.events(self.number, tasks, offset), *renumbered]

    def _notes(self, name: str, journal: PartJournal) -> StepNotes:
        """What a worker has noted, in the same numbers and on the same clock."""
        notes = journal.notes.renumbered(self.placed.tasks[name])
        if notes.left:
            number = self.placed.names.number
            notes.left = {(number(task), number(before)): at for (task, before), at in notes.left.items()}
        offset = self.clocks[name][0]
        return notes.shifted(-offset) if offset else notes

    def _agreed(self, notes: Mapping[str, StepNotes]) -> Mapping[str, StepNotes]:
        """Have the times of workers on several machines agree with the messages between them."""
        crossings = []
        for name, part in notes.items():
            for (task, _), left in part.left.items():
                receiver = self.pipeline.workers[self.graph.tasks[task].lane.device].name
                arrived = notes[receiver].arrived.get(task) if receiver in notes else None
                if arrived is not None:
                    crossings.append(EdgePassage(name, left, receiver, arrived))
        if not crossings:
            return notes
        shifts = agreed_shifts({name: error for name, (_, error) in self.clocks.items()}, crossings)
        for name, shift in shifts.items():
            offset, error = self.clocks[name]
            self.clocks[name] = offset - shift, error
        return {name: part.shifted(shifts.get(name, 0.0)) for name, part in notes.items()}

    def finish(self, now: float) -> StepCompleted:
        """All its parts have ended: how it has."""
        self._over = now
        completed = sum(self.ended[name].completed for name in self.told())
        if self.error is None and completed == len(self.graph.tasks):
            return StepCompleted(self.number, Outcome.OK)
        return next(event for _, event in reversed(self.record().journal) if isinstance(event, StepCompleted))


def _is_others(failure: TaskFailed) -> bool:
    """Whether a task failed since one of another worker did."""
    return isinstance(failure.error, EdgeError)


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
