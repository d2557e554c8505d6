"""Executors: one persistent thread per device runs what it is handed, in order.

An executor is the seam to other kinds of devices (and, later, other machines), so it is small. Guarantees:

- A task begins after those that it depends on and that were submitted here before it; this one runs everything in
  the order in which it was submitted.
- Every submitted task comes back exactly once as completed, failed or dropped; one that an asynchronous
  device only queued comes back as issued first. ``BaseException`` is reported like any other.
- Nothing is kept while idle: no assignment, no tensor, no exception.
- ``submit`` and ``close`` never block; ``join`` waits for the threads, after ``close``.

Nobody can end a thread. So a task that hangs can be given up, where the executor is ``Replaceable``: the device gets a
new thread, which takes over what was queued, and the old one reports nothing any more::

    thread     claim made ─▶ work ─▶ claim taken ─▶ report
                               │
    give_up                    └────▶ claim taken ─▶ new thread; the old one finds its claim gone, and ends

Who takes the claim, of which there is one for each task, has the last word on it: taking is a list's ``pop``, which is
one instruction of the interpreter. A thread without its claim touches nothing any more, so its successor goes on with
the same queue: nothing that another thread puts there meanwhile can be lost or overtaken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from queue import SimpleQueue
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from asyncpipe.core.engine.events import Event, TaskCompleted, TaskDropped, TaskFailed, TaskIssued
from asyncpipe.core.graph.task_graph import TaskGraph

__all__ = [
    "Assignment",
    "Completion",
    "Current",
    "Executor",
    "Replaceable",
    "Report",
    "StepHandle",
    "ThreadExecutor",
    "Work",
]

_logger = logging.getLogger(__name__)


class Completion(Protocol):
    """Work that an asynchronous device has queued and not done."""

    def wait(self) -> tuple[float, float]:
        """Block until the device is done; when it began and ended, in seconds of ``time.perf_counter``."""


Work = Callable[[], Completion | None]
"""A task's computation: ``None`` if it is done on return, else what to wait for."""


class Report(Protocol):
    """Takes an event to the scheduler; called on executor threads."""

    def __call__(self, event: Event, *, wake: bool = True) -> None:
        """Without ``wake`` the event may lie until another one wakes the scheduler, which must follow."""


class StepHandle(Protocol):
    """What an executor must know of the step that a task belongs to."""

    number: int
    graph: TaskGraph
    aborted: bool
    """Once true, tasks that have not begun are dropped."""


class Assignment(NamedTuple):
    """One task, handed to an executor."""

    step: StepHandle
    task: int
    work: Work
    awaited: bool = True
    """Whether another device waits for it: then the scheduler must hear of it at once."""


class Executor(Protocol):
    """Runs the tasks of one device."""

    def start(self, report: Report) -> None:
        """Begin to take work, and call ``report`` with what becomes of it."""

    def submit(self, assignments: Sequence[Assignment]) -> None:
        """Queue tasks behind those submitted before. Called on the loop's thread; must not block."""

    def close(self) -> None:
        """Take no more work; what is queued still runs. May be called again, from any thread."""

    def join(self) -> None:
        """Wait until the last task has been reported."""


Claim: TypeAlias = list[None]
"""Holds one thing, until the task is reported or given up."""

Current: TypeAlias = tuple[StepHandle, int, float, Claim]
"""A task that an executor is at: its step and number, when it began, and its claim."""


@runtime_checkable
class Replaceable(Protocol):
    """An executor that can give up a task which hangs."""

    thread: int | None
    """The identifier of the thread that runs tasks now, once it has started."""

    @property
    def current(self) -> Current | None:
        """The task that it is at, if any. From any thread."""

    def give_up(self, current: Current, fail: Callable[[], None]) -> bool:
        """Go on without that task, of which ``fail`` reports that it failed; false if it has just ended by itself.

        Called on the loop's thread. What waits goes on behind ``fail``, so that nothing more of the step is run. The
        task goes on until it returns; what it then comes to is dropped.
        """


class ThreadExecutor:
    """One persistent thread for a device; a second one waits for completions where the device is asynchronous."""

    def __init__(self, device: str, *, on_start: Callable[[], None] | None = None) -> None:
        """``on_start`` runs first on the device's thread (to set its intra-op threads, say)."""
        self.device = device
        self._on_start = on_start
        self._line = _Line(device, _report_nothing)
        self._thread: threading.Thread | None = None
        self._given_up: list[threading.Thread] = []

    @property
    def thread(self) -> int | None:
        """As ``Replaceable`` has it."""
        return None if self._thread is None else self._thread.ident

    @property
    def current(self) -> Current | None:
        """As ``Replaceable`` has it: of the thread's and of what is waited for, the one that began first."""
        run, waited = self._line.current, self._line.watcher.current
        if run is None or waited is None:
            return run or waited
        # A busy thread must not hide a completion that never comes.
        return min(run, waited, key=lambda current: current[2])

    def start(self, report: Report) -> None:
        self._line = _Line(self.device, report)
        self._start()

    def submit(self, assignments: Sequence[Assignment]) -> None:
        self._line.queue.put(assignments)

    def give_up(self, current: Current, fail: Callable[[], None]) -> bool:
        if not _take(current[3]):
            return False
        try:
            fail()
        finally:
            self._replace(current)
        return True

    def _replace(self, current: Current) -> None:
        """Give the thread that is at this task a successor."""
        old = self._line.watcher.give_up(current)
        if old is None:
            old = self._thread
            self._line = self._line.succeeded()
            self._start()
        assert old is not None
        old.name += " (given up)"
        self._given_up = [*(thread for thread in self._given_up if thread.is_alive()), old]

    def close(self) -> None:
        self._line.queue.put(None)

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._line.watcher.join()
        if left := [thread.name for thread in self._given_up if thread.is_alive()]:
            _logger.warning("%d threads of tasks that were given up still run: %s", len(left), ", ".join(left))

    def _start(self) -> None:
        # The target is no bound method of self: a dropped executor can be collected while its thread idles.
        self._thread = threading.Thread(
            target=_serve, args=(self._line, self._on_start), name=f"asyncpipe {self.device}", daemon=True
        )
        self._thread.start()


def _report_nothing(event: Event, *, wake: bool = True) -> None:
    """Stands in until the executor is started."""


class _Line:
    """What one thread of a device works on. Another thread can take over what waits."""

    def __init__(self, device: str, report: Report) -> None:
        self.queue: SimpleQueue[Sequence[Assignment] | None] = SimpleQueue()
        self.batch: deque[Assignment] = deque()
        """The rest of what was taken from the queue last."""
        self.current: Current | None = None
        self.report = report
        self.watcher = _CompletionWatcher(device, report)

    def succeeded(self) -> _Line:
        """The same line for another thread; that of this one hangs, and has lost its claim."""
        line = copy(self)
        line.current = self.current = None
        return line


def _serve(line: _Line, on_start: Callable[[], None] | None) -> None:
    """The life of a device's thread."""
    if on_start is not None:
        on_start()
    batch = line.batch
    while True:
        while batch:
            if not _run(line, batch.popleft()):
                return
        if (assignments := line.queue.get()) is None:
            break
        batch.extend(assignments)
        # An idle thread must not keep the last step alive.
        del assignments
    line.watcher.close()


def _run(line: _Line, assignment: Assignment) -> bool:
    """Run a task and report it; false if it was given up meanwhile."""
    step, task, work, awaited = assignment
    report = line.report
    if step.aborted:
        report(TaskDropped(step.number, task))
        return True
    # A copy that only feeds the next task here needs no wake-up of its own: half of them are such. Nor may a step's
    # last one wait for a task of another job.
    wake = awaited or not line.batch or line.batch[0].step is not step
    claim: Claim = [None]
    started = time.perf_counter()
    line.current = (step, task, started, claim)
    try:
        completion = work()
    except BaseException as error:  # noqa: BLE001 - reported, so that nobody waits for ever
        number = step.number
        # The error holds this frame, and the step will hold the error.
        del assignment, step, work
        if not _take(claim):
            return False
        line.current = None
        report(TaskFailed(number, task, error))
        return True
    if not _take(claim):
        return False
    line.current = None
    if completion is None:
        report(TaskCompleted(step.number, task, started, time.perf_counter()), wake=wake)
    else:
        report(TaskIssued(step.number, task, time.perf_counter() - started), wake=wake)
        line.watcher.watch(step, task, completion)
    return True


def _take(claim: Claim) -> bool:
    """Whether the claim was still there; then it is the caller's."""
    try:
        claim.pop()
    except IndexError:
        return False
    return True


class _CompletionWatcher:
    """Waits for an asynchronous device's tasks in issue order, on a thread that exists from the first one on."""

    def __init__(self, device: str, report: Report) -> None:
        self.device = device
        self.report = report
        self._waiting = _Waiting(SimpleQueue())
        self._thread: threading.Thread | None = None

    @property
    def current(self) -> Current | None:
        """The task whose completion is waited for."""
        return self._waiting.current

    def watch(self, step: StepHandle, task: int, completion: Completion) -> None:
        if self._thread is None:
            self._start()
        self._waiting.queue.put((step, task, completion))

    def give_up(self, current: Current) -> threading.Thread | None:
        """Wait for those behind that task on a new thread, if it is the one that is waited for; which thread hangs."""
        if self._waiting.current is not current:
            return None
        old = self._thread
        # The device's thread may be about to put something there.
        self._waiting = _Waiting(self._waiting.queue)
        self._start()
        return old

    def close(self) -> None:
        self._waiting.queue.put(None)

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=_watch,
            args=(self._waiting, self.report),
            name=f"asyncpipe {self.device} completions",
            daemon=True,
        )
        self._thread.start()


class _Waiting:
    """What one thread of a watcher waits for."""

    def __init__(self, queue: SimpleQueue[tuple[StepHandle, int, Completion] | None]) -> None:
        self.queue = queue
        self.current: Current | None = None


def _watch(waiting: _Waiting, report: Report) -> None:
    while (item := waiting.queue.get()) is not None:
        step, task, completion = item
        number = step.number
        claim: Claim = [None]
        waiting.current = (step, task, time.perf_counter(), claim)
        event: Event
        try:
            started, ended = completion.wait()
        except BaseException as error:  # noqa: BLE001 - reported, so that nobody waits for ever
            event = TaskFailed(number, task, error)
        else:
            event = TaskCompleted(number, task, started, ended)
        if not _take(claim):
            return
        waiting.current = None
        report(event)
        del item, step, completion, event
