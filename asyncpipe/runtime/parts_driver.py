"""The driver of steps that run in workers: starts the parts of each step, and puts what they tell into one record.

It decides nothing: every worker has a driver and a scheduler of its own, and no tensor and no dependency comes this
way. It is in two places where one controller has to be: a step that fails in one worker is stopped in the others, and
a step is over when all its parts are. A third one is the watchdog: it sees what runs in each worker (``TaskBoard``),
and asks what each is at where nothing happens (``HangSearch``)::

    start ──▶ StartPart to each worker ──▶ PartEnded of each ──▶ futures, observers
                          │ the first that failed, a lost worker, or a cancellation
                          └──▶ Call("stop") to the others

Everything runs on one loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy

from asyncpipe.core.engine.events import Event
from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.errors import EdgeError, HangError, WorkerLostError
from asyncpipe.runtime.hang_search import HangSearch
from asyncpipe.runtime.part_messages import Call, PartEnded, StartPart
from asyncpipe.runtime.parts_execution import PartsExecution, PlacedPipeline, WorkerLink
from asyncpipe.runtime.step_abort import StepAbort
from asyncpipe.runtime.step_driver import CANCEL_SECONDS, StepDriver
from asyncpipe.runtime.watchdog import Suspect

__all__ = ["LOSS_SECONDS", "PartsDriver"]

LOSS_SECONDS = 1.0
"""For a worker to be known as lost, when an edge to it broke."""


class PartsDriver(StepDriver[PartsExecution]):
    """Runs steps in workers, several at a time. ``Driver`` does the same on threads."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock)
        self._search = HangSearch(clock, self._tasks_in, self._hung)
        self._pipelines: set[PlacedPipeline] = set()
        """Those whose observers are told of losses."""

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
        first: Call | None = None,
    ) -> PartsExecution:
        """Begin one step of ``graph``, behind ``after`` if that is given, which may be under way.

        ``work`` has for each worker what its part computes with; ``first`` is called there before. Raises
        ``PipelineClosedError`` or ``WorkerLostError`` before anything runs.
        """
        self._check_open(pipeline.tenant)
        workers = pipeline.graph(graph).workers
        for worker in workers.values():
            if worker.lost is not None:
                raise worker.lost.while_running(())
        if pipeline.broken is not None:
            raise copy(pipeline.broken)
        execution = PartsExecution(StepAbort(self._next_number), graph, pipeline, self._clock())
        self._begin(execution, after)
        self._search.begin(execution)
        for name, worker in workers.items():
            if first is not None:
                worker.send(first)
            worker.send(StartPart(pipeline.number, execution.number, execution.follows, work[name]))
        return execution

    def cancel(self, execution: PartsExecution) -> None:
        if execution.number in self._under_way:
            self._stop(execution)

    def _give_up_late(self, step: PartsExecution) -> None:
        left = [worker for name, worker in step.workers.items() if name not in step.ended and worker.lost is None]
        running = {worker: [task.id for of, task, _ in self._tasks_in(worker) if of is step] for worker in left}
        # Those that run nothing wait for those that do, unless nobody can be seen to run anything.
        for worker in [worker for worker in left if running[worker]] or left:
            what = " and ".join(running[worker]) or "its part"
            worker.kill(f"{what} of a cancelled step did not end within {CANCEL_SECONDS:g} s", stacks=True)

    def _stop(self, execution: PartsExecution) -> None:
        """Tell the workers of this step, and of those behind it, to begin no more tasks."""
        execution.abort.cancel(self._stop_parts)

    def _stop_parts(self, event: Event, *, wake: bool = True, at: float | None = None) -> None:
        if (step := self._under_way.get(event.step)) is not None:
            running = [worker for worker in step.workers if worker not in step.ended]
            _tell(step, Call(step.pipeline.number, "stop", (step.number,)), running)

    def settle(self, execution: PartsExecution, *, keep: bool) -> None:
        """A step has ended: have its workers keep what it has left there, or undo it. From any thread."""
        _tell(execution, Call(execution.pipeline.number, "settle", (execution.number, keep)), execution.workers)

    def close(self) -> None:
        self.is_closed = True
        for execution in list(self._under_way.values()):
            self._stop(execution)

    # What workers tell

    def part_ended(self, worker: str, part: PartEnded) -> None:
        """``worker`` has ended its part of a step."""
        execution = self._under_way.get(part.step)
        if execution is None or worker in execution.ended:
            return
        self._search.moved(part.step)
        link = execution.workers[worker]
        execution.clocks[worker] = link.clock_offset, link.clock_error
        execution.ended[worker] = part
        if part.error is not None and execution.error is None:
            execution.error = part.error
        if part.error is not None or part.failed:
            self._stop(execution)
        if len(execution.ended) == len(execution.workers):
            self._finish(execution)

    def worker_lost(self, worker: WorkerLink, error: WorkerLostError) -> None:
        """``worker`` is gone: end the steps that it has a part of."""
        hang = self._search.lost(worker)
        for pipeline in self._pipelines:
            if worker in pipeline.workers.values():
                pipeline.tell(worker)
        ran = self._tasks_in(worker)
        for execution in list(self._under_way.values()):
            if execution.workers.get(worker.name) is worker and worker.name not in execution.ended:
                found = error.while_running([_named(execution, other, task) for other, task, _ in ran], hang)
                self.part_ended(worker.name, PartEnded(execution.number, error=found))

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
        for execution in list(self._under_way.values()):
            if execution.pipeline is pipeline:
                execution.error = execution.error or error
                self._stop(execution)

    # For the watchdog

    def suspects(self) -> Sequence[Suspect]:
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
            if (execution := self._under_way.get(step)) is not None and worker.name in execution.workers:
                whole = execution.placed.tasks[worker.name][number]
                found.append((execution, execution.graph.tasks[whole], started))
        return found

    def _finish(self, execution: PartsExecution) -> None:
        end = execution.finish(self._clock())
        self._search.end(execution.number)
        self._end(execution, end)
        for part in execution.ended.values():
            execution.pipeline.compilations += part.compilations
            execution.pipeline.times.means.update(part.times)
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
