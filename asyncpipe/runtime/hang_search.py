"""The search for the root of a hang over workers: all are asked what they are at, and what is then done about it.

::

    Watchdog ── suspects ──▶ a task that runs for too long, a worker that is silent, a step in which nothing happens
        │
        └── give_up ──▶ all workers of the step are asked, and answer on the thread that answers pings, or do not
                                     │
                          hang_roots (core/hangs/roots.py) ──▶ the root is a worker: it is killed, WorkerLostError
                                                           └──▶ it is the link between two: the step fails, HangError

That nothing happens is seen at each look of the watchdog: workers of a step that began before the last look say a
number that changes whenever something happens there.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from asyncpipe.core.graph.task import Task
from asyncpipe.core.hangs.reports import AskedFor, RunningReport, SeenWorker, WorkerReport
from asyncpipe.core.hangs.roots import HangRoot, HangState, cut_off, hang_roots
from asyncpipe.errors import HangError, WorkerLostError
from asyncpipe.runtime.parts_execution import PartsExecution, PlacedPipeline, WorkerLink
from asyncpipe.runtime.watchdog import Suspect

__all__ = ["HangSearch"]

_logger = logging.getLogger(__name__)

LONGEST_SECONDS = 20.0
"""For an answer of a worker that answers pings."""
SHORTEST_PATIENCE, LONGEST_PATIENCE = 1.0, 5.0
"""Bounds of the seconds after which a worker that is silent is not waited for."""
INQUIRY = "asyncpipe search for a hang"
"""The name of the coroutine that asks."""
PROBE_SECONDS = 0.5
"""How long a small message may take from one worker to another."""
LOOK_SECONDS = 0.05
"""How often it is seen whether one is."""
LOOKS_AT_BEGIN = 10
"""How often a step may be found not to have begun in a worker: its mini-batch may be on its way there."""


@dataclass(eq=False)
class _Look:
    """What is known of a step."""

    step: PartsExecution
    began: float
    moved_at: float
    """When something was last seen to have happened."""
    told: dict[str, tuple[float, WorkerReport]] = field(default_factory=dict)
    """What each worker has said last, and when."""
    asked: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    inquiry: asyncio.Task[None] | None = None
    unbegun: int = 0
    """How often a worker was found that had not begun it."""


class _Suspicion(NamedTuple):
    """What may hang in a worker, or in the step as a whole."""

    look: _Look
    worker: WorkerLink | None = None
    """``None`` if it is the step in which nothing happens."""
    task: Task | None = None
    """``None`` if it is the worker that is silent."""
    expected: float | None = 0.0
    """The seconds that the task usually takes."""

    def usually(self, seconds: float) -> str:
        """What the task has done, in place of what it usually does."""
        assert self.task is not None
        usual = "it had not run before" if self.expected is None else f"usually it takes {self.expected:.3g} s"
        return f"{self.task.id} on {self.task.lane.device} did not end within {seconds:.3g} s ({usual})"


class HangSearch:
    """Watches the steps of one ``PartsDriver``. Used on its loop, but for ``suspects``, and what these do."""

    def __init__(
        self,
        clock: Callable[[], float],
        tasks_in: Callable[[WorkerLink], Sequence[tuple[PartsExecution, Task, float]]],
        fail: Callable[[PartsExecution, HangError], None],
    ) -> None:
        """``tasks_in`` are the tasks that are seen to run in a worker: (step, task, since when). From any thread.

        ``fail`` ends a step with an error.
        """
        self._clock = clock
        self._tasks_in = tasks_in
        self._fail = fail
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looks: dict[int, _Look] = {}
        self._looked_at = 0.0
        self._killed: dict[WorkerLink, HangError] = {}
        """Those that are not gone yet."""

    def begin(self, step: PartsExecution) -> None:
        """A step begins."""
        self._loop = asyncio.get_running_loop()
        now = self._clock()
        self._looks[step.number] = _Look(step, now, now)

    def moved(self, step: int) -> None:
        """Something has happened in a step."""
        self._looks[step].moved_at = self._clock()

    def end(self, step: int) -> None:
        """A step is over."""
        look = self._looks.pop(step)
        for asking in (*look.asked.values(), look.inquiry):
            if asking is not None:
                asking.cancel()

    def lost(self, worker: WorkerLink) -> HangError | None:
        """A worker is gone: why it was killed, if it was killed here."""
        return self._killed.pop(worker, None)

    # For the watchdog, from any thread

    def suspects(self) -> list[Suspect]:
        """What runs in workers, the workers that are silent during a step, and the steps that stand still."""
        looks = [look for look in list(self._looks.values()) if look.inquiry is None]
        before, self._looked_at = self._looked_at, self._clock()
        if (older := [look for look in looks if look.began < before]) and self._loop is not None:
            with suppress(RuntimeError):  # The loop is closed: nobody waits for these steps.
                self._loop.call_soon_threadsafe(self._ask, older)
        found: list[Suspect] = []
        workers: set[WorkerLink] = set()
        pipelines: set[PlacedPipeline] = set()
        for look in looks:
            for name, worker in look.step.workers.items():
                if name in look.step.ended or worker in self._killed:
                    continue
                found += self._running(look, worker)
                if worker not in workers:
                    # One that is stopped between two tasks runs none. It may take as long to answer as a task.
                    workers.add(worker)
                    found.append(self._suspect(self._clock() - worker.silent_seconds, look, worker))
            # A step that is behind another one waits for that.
            if look.step.pipeline not in pipelines and not look.step.abort.is_requested:
                pipelines.add(look.step.pipeline)
                found.append(self._suspect(look.moved_at, look))
        return found

    def _running(self, look: _Look, worker: WorkerLink) -> Iterator[Suspect]:
        step, tasks = look.step, self._tasks_in(worker)
        running = [(task, started) for other, task, started in tasks if other is step]
        if not tasks and worker.name in look.told:  # It may be on another host.
            at, told = look.told[worker.name]
            running = [(step.graph.tasks[r.task], at - r.seconds) for r in told.running if r.step == step.number]
        for task, started in running:
            yield self._suspect(started, look, worker, task, step.pipeline.times.expected(task))

    def _suspect(
        self,
        started: float,
        look: _Look,
        worker: WorkerLink | None = None,
        task: Task | None = None,
        expected: float | None = 0.0,
    ) -> Suspect:
        return Suspect(started, expected, partial(self.begin_inquiry, _Suspicion(look, worker, task, expected)))

    def begin_inquiry(self, suspect: _Suspicion, seconds: float, found: Callable[[str], object]) -> None:
        """Ask all workers of the step what they are at, and end what hangs."""
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._begin_inquiry, suspect, seconds, found)

    # On the loop

    def _ask(self, looks: Sequence[_Look]) -> None:
        """Ask workers whether something has happened; each of them once at a time."""
        for look in looks:
            for name, worker in look.step.workers.items():
                if look.step.number in self._looks and name not in look.asked and name not in look.step.ended:
                    look.asked[name] = asyncio.ensure_future(self._hear(look, worker))

    async def _hear(self, look: _Look, worker: WorkerLink) -> None:
        try:
            with suppress(WorkerLostError):
                report = await worker.query((look.step.number, AskedFor.MOVED))
                self._note(look, worker.name, _numbered(look.step, report))
        finally:
            del look.asked[worker.name]

    def _note(self, look: _Look, worker: str, report: WorkerReport) -> None:
        now, before = self._clock(), look.told.get(worker)
        # What a worker that is done with the step says first tells nothing: it is not asked before an inquiry.
        if (worker not in look.step.ended) if before is None else before[1].moved != report.moved:
            look.moved_at = now
        look.told[worker] = now, report

    def _begin_inquiry(self, suspect: _Suspicion, seconds: float, found: Callable[[str], object]) -> None:
        look = suspect.look
        if look.inquiry is None and look.step.number in self._looks:
            inquiry = self._inquire(suspect, seconds, found)
            look.inquiry = asyncio.get_running_loop().create_task(inquiry, name=INQUIRY)
            look.inquiry.add_done_callback(lambda inquiry: _over(look, inquiry))

    async def _inquire(self, suspect: _Suspicion, seconds: float, found: Callable[[str], object]) -> None:
        look, step, began = suspect.look, suspect.look.step, self._clock()
        there = {name: worker for name, worker in step.workers.items() if worker.lost is None}
        patience = min(max(seconds / 2, SHORTEST_PATIENCE), LONGEST_PATIENCE)
        told = await _answers(there, (step.number, AskedFor.ALL), patience)
        # Large graphs take some time.
        reports = await asyncio.to_thread(lambda: {name: _numbered(step, report) for name, report in told.items()})
        for name, report in reports.items():
            self._note(look, name, report)
        seen = [self._seen(look, worker, reports.get(name)) for name, worker in step.workers.items()]
        roots = await asyncio.to_thread(hang_roots, step.number, step.graph, seen)
        root = self._chosen(suspect, seconds, roots, reports, look.moved_at >= began)
        if root is None:
            return
        whose = await self._cut_off(look, there, patience) if root.state is HangState.WAITS_FOR_EDGE else None
        error = await _hang_error(root, reports, whose)
        if step.number not in self._looks:
            return  # It has ended meanwhile.
        if root.state is HangState.WAITS_FOR_EDGE:
            self._fail(step, error)
            found(f"step {step.number} is given up: {error.story}")
            return
        worker = step.workers[root.worker]
        if worker in self._killed or worker.lost is not None:
            return
        why = str(root)
        if root.state is HangState.SILENT:
            why = f"it has not answered for {worker.silent_seconds:.3g} s"
        elif suspect.worker is worker and suspect.task is not None:
            why = suspect.usually(seconds)
        self._killed[worker] = error
        worker.kill(why, stacks=True)
        more = "" if why == str(error) else f"{why}\n"
        found(f"worker {worker.name!r} is killed: {more}{error.story}")

    async def _cut_off(self, look: _Look, there: Mapping[str, WorkerLink], patience: float) -> str | None:
        """The worker that nothing gets through to or from: all send something on all edges, to see what comes."""
        number = look.step.number
        await _answers(there, (number, AskedFor.PROBES), patience)
        await asyncio.sleep(PROBE_SECONDS)
        reports = await _answers(there, (number, AskedFor.ALL), patience)
        return cut_off([self._seen(look, worker, reports.get(name)) for name, worker in there.items()])

    def _chosen(
        self,
        suspect: _Suspicion,
        seconds: float,
        roots: Sequence[HangRoot],
        reports: Mapping[str, WorkerReport],
        has_moved: bool,
    ) -> HangRoot | None:
        """The root that is to be ended; ``None`` if nothing hangs, or nothing that may not take more time."""
        worker, task = suspect.worker, suspect.task
        if worker is None:
            return None if has_moved else self._root_of_still(suspect.look, roots)
        mine = [root for root in roots if root.worker == worker.name]
        if worker.name not in reports:
            made = HangRoot(HangState.SILENT, worker.name, seconds=worker.silent_seconds)
            return next((root for root in mine if root.state is HangState.SILENT), made)
        number = suspect.look.step.number
        runs = {each.task for each in reports[worker.name].running if each.step == number}
        if task is None or task.number not in runs:
            return None  # It answers again, or the task has just ended.
        alike = suspect.look.step.pipeline.alike
        if alike and _waits(alike, worker.name, task.number, number, reports):
            # In a collective, for one that runs the same part: who has run for longer, and waits for nobody?
            return next(
                (
                    HangRoot(HangState.COMPUTING, name, each.device, each.name, seconds=each.seconds)
                    for name, report in reports.items()
                    for each in report.running
                    if each.step == number and each.seconds >= seconds
                    if not _waits(alike, name, each.task, number, reports)
                ),
                None,
            )
        made = HangRoot(HangState.COMPUTING, worker.name, task.lane.device, task.id, seconds=seconds)
        return next((root for root in mine if (root.device, root.task) == (made.device, made.task)), made)

    def _root_of_still(self, look: _Look, roots: Sequence[HangRoot]) -> HangRoot | None:
        root = roots[0] if roots else None
        # A task may run for longer than the floor, and a worker that is gone ends its steps anyway.
        if root is not None and root.state not in (HangState.COMPUTING, HangState.GONE):
            look.unbegun += not root.task and root.state is HangState.NOT_BEGINNING
            if not 0 < look.unbegun < LOOKS_AT_BEGIN:
                return root
        look.moved_at = self._clock()  # To look again after another floor.
        return None

    def _seen(self, look: _Look, worker: WorkerLink, report: WorkerReport | None) -> SeenWorker:
        step, now = look.step, self._clock()
        devices = tuple(device for device in step.graph.own_devices if step.pipeline.workers[device] is worker)
        running = [
            RunningReport(task.lane.device, other.number, task.number, task.id, now - started)
            for other, task, started in self._tasks_in(worker)
        ]
        if not running and worker.name in look.told:
            running = list(look.told[worker.name][1].running)
        how = "" if worker.lost is None else worker.lost.how
        return SeenWorker(worker.name, devices, report, worker.silent_seconds, running, how)


def _numbered(step: PartsExecution, report: WorkerReport) -> WorkerReport:
    """``report`` of a worker, in numbers of the step's graph."""
    return report.numbered(step.number, lambda name: step.placed.names.number(name))


def _waits(
    alike: Mapping[str, Collection[str]], worker: str, task: int, step: int, reports: Mapping[str, WorkerReport]
) -> bool:
    """Whether a worker of those that run the same part has not come yet to what ``worker`` runs.

    All run it in the order of the tasks' numbers.
    """
    for report in (reports[name] for name in alike.get(worker, ()) if name in reports):
        reached = [each.task for each in report.running if each.step == step]
        if not reached:  # What it runs next is not begun.
            reached = [-1] if report.part is None else [head - 1 for head in report.part.heads.values()]
        if reached and max(reached) < task:
            return True
    return False


def _over(look: _Look, inquiry: asyncio.Task[None]) -> None:
    look.inquiry = None
    if not inquiry.cancelled() and (error := inquiry.exception()) is not None:
        _logger.error("the search for what hangs failed, which is a bug in asyncpipe; it begins again", exc_info=error)


async def _answers(workers: Mapping[str, WorkerLink], question: object, patience: float) -> dict[str, WorkerReport]:
    """What each worker answers; without those that are gone, or that nothing has come from for ``patience`` seconds."""
    asked = {name: asyncio.ensure_future(worker.query(question)) for name, worker in workers.items()}
    until = time.monotonic() + LONGEST_SECONDS
    try:
        while waiting := {name: task for name, task in asked.items() if not task.done()}:
            await asyncio.wait(waiting.values(), timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if all(workers[name].silent_seconds >= patience for name in waiting) or time.monotonic() > until:
                break
    finally:
        for task in asked.values():
            task.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)
    return {name: task.result() for name, task in asked.items() if not task.cancelled() and task.exception() is None}


async def _hang_error(root: HangRoot, reports: Mapping[str, WorkerReport], whose: str | None) -> HangError:
    """The error that names ``root``, with the stack of the thread at fault if its worker has answered."""
    report = reports.get(root.worker)
    # The lines of the code are read from files, which may take its time.
    stack = "" if report is None else await asyncio.to_thread(_stack, root, report)
    return HangError(
        str(root),
        root.state.value,
        worker=root.worker,
        device=root.device,
        task_id=root.task,
        peer=root.peer,
        cut_off=whose,
        seconds=root.seconds,
        waits=tuple(map(str, root.waits)),
        stack=stack,
    )


def _is_at_fault(root: HangRoot, thread: str) -> bool:
    """Whether the stack of a thread of the root's worker tells more."""
    if root.state is HangState.COMPUTING:
        return thread in (f"asyncpipe {root.device}", f"asyncpipe {root.device} completions")
    if root.state is HangState.NOT_TAKING:
        return thread == root.thread
    if root.state is HangState.NOT_BEGINNING:
        return thread == "MainThread"
    return root.state is HangState.NOT_SENDING and "edge" in thread


def _stack(root: HangRoot, report: WorkerReport) -> str:
    """The stacks of the threads that are at fault, with the lines of code where this host has them."""
    texts = []
    for thread, calls in report.stacks.items():
        if _is_at_fault(root, thread):
            frames = [traceback.FrameSummary(file, line, name) for file, line, name in calls]
            lines = traceback.StackSummary.from_list(frames).format()
            texts.append(f"{thread} of worker {root.worker!r}:\n{''.join(lines)}")
    return "\n".join(texts)
