"""Executors: one persistent thread per device runs what it is handed, in order.

An executor is the seam to other kinds of devices (and, later, other machines), so it is small. Guarantees:

- A task begins after those that it depends on and that were submitted here before it; this one runs everything in
  the order in which it was submitted.
- Every submitted task comes back exactly once as completed, failed or dropped; one that an asynchronous
  device only queued comes back as issued first. ``BaseException`` is reported like any other.
- Nothing is kept while idle: no assignment, no tensor, no exception.
- ``submit`` and ``close`` never block; ``join`` waits for the threads, after ``close``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from asyncpipe.core.events import Event, TaskCompleted, TaskDropped, TaskFailed, TaskIssued
from asyncpipe.core.graph import TaskGraph

__all__ = ["Assignment", "Completion", "Executor", "Report", "StepHandle", "ThreadExecutor", "Work"]


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


class ThreadExecutor:
    """One persistent thread for a device; a second one waits for completions where the device is asynchronous."""

    def __init__(self, device: str, *, on_start: Callable[[], None] | None = None) -> None:
        """``on_start`` runs first on the device's thread (to set its intra-op threads, say)."""
        self.device = device
        self._on_start = on_start
        self._queue: SimpleQueue[Sequence[Assignment] | None] = SimpleQueue()
        self._watcher: _CompletionWatcher | None = None
        self._thread: threading.Thread | None = None

    def start(self, report: Report) -> None:
        self._watcher = _CompletionWatcher(self.device, report)
        # The target is no bound method of self: a dropped executor can be collected while its thread idles.
        self._thread = threading.Thread(
            target=_serve,
            args=(self._queue, report, self._watcher, self._on_start),
            name=f"asyncpipe {self.device}",
            daemon=True,
        )
        self._thread.start()

    def submit(self, assignments: Sequence[Assignment]) -> None:
        self._queue.put(assignments)

    def close(self) -> None:
        self._queue.put(None)

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._watcher is not None:
            self._watcher.join()


def _serve(
    queue: SimpleQueue[Sequence[Assignment] | None],
    report: Report,
    watcher: _CompletionWatcher,
    on_start: Callable[[], None] | None,
) -> None:
    """The life of a device's thread."""
    if on_start is not None:
        on_start()
    while (assignments := queue.get()) is not None:
        last = assignments[-1]
        for assignment in assignments:
            # A copy that only feeds the next task here needs no wake-up of its own: half of them are such.
            _run(assignment, report, watcher, wake=assignment.awaited or assignment is last)
        # An idle thread must not keep the last step alive.
        del assignments, assignment, last
    watcher.close()


def _run(assignment: Assignment, report: Report, watcher: _CompletionWatcher, *, wake: bool) -> None:
    step, task, work, _ = assignment
    if step.aborted:
        report(TaskDropped(step.number, task))
        return
    started = time.perf_counter()
    try:
        completion = work()
    except BaseException as error:  # noqa: BLE001 - reported, so that nobody waits for ever
        number = step.number
        # The error holds this frame, and the step will hold the error.
        del assignment, step, work
        report(TaskFailed(number, task, error))
        return
    if completion is None:
        report(TaskCompleted(step.number, task, started, time.perf_counter()), wake=wake)
    else:
        report(TaskIssued(step.number, task, time.perf_counter() - started), wake=wake)
        watcher.watch(step.number, task, completion)


class _CompletionWatcher:
    """Waits for an asynchronous device's tasks in issue order, on a thread that exists from the first one on."""

    def __init__(self, device: str, report: Report) -> None:
        self._device = device
        self._report = report
        self._queue: SimpleQueue[tuple[int, int, Completion] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, step: int, task: int, completion: Completion) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_watch,
                args=(self._queue, self._report),
                name=f"asyncpipe {self._device} completions",
                daemon=True,
            )
            self._thread.start()
        self._queue.put((step, task, completion))

    def close(self) -> None:
        self._queue.put(None)

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()


def _watch(queue: SimpleQueue[tuple[int, int, Completion] | None], report: Report) -> None:
    while (item := queue.get()) is not None:
        step, task, completion = item
        try:
            started, ended = completion.wait()
        except BaseException as error:  # noqa: BLE001 - reported, so that nobody waits for ever
            report(TaskFailed(step, task, error))
        else:
            report(TaskCompleted(step, task, started, ended))
        del item, completion
