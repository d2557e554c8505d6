"""Executors: one persistent thread per device runs the tasks that it is given, in order.

``Executor`` is the seam to other kinds of devices. Guarantees:

- A task begins after the tasks that it depends on and that were submitted to the same executor before it.
  ``ThreadExecutor`` runs all tasks in the order in which they were submitted.
- Every submitted task is reported exactly once as completed, failed or dropped. A task that an asynchronous device has
  only queued is first reported as issued. ``BaseException`` is reported like any other exception.
- An idle executor keeps no assignment, tensor or exception alive.
- ``submit`` and ``close`` never block. ``join`` waits for the threads, after ``close``.

Python cannot kill a thread. A ``Replaceable`` executor therefore abandons a hung task: it starts a new thread, which
takes over the queue, and ignores whatever the old thread reports later::

    thread     token made ─▶ task function ─▶ token taken ─▶ event posted
                                   │
    give_up                        └────────▶ token taken ─▶ new thread; the old one finds no token, and ends

Each task has one completion token. The thread and ``give_up`` race to pop it from a one-element list (``list.pop`` is
atomic under the GIL); only the winner reports the task. A thread that lost the race touches nothing any more, so its
successor can go on with the same queue: no assignment is lost or overtaken.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from asyncpipe.core.engine.events import Event, TaskCompleted, TaskDropped, TaskFailed, TaskIssued
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.runtime.task_threads import mark_thread

__all__ = [
    "Assignment",
    "Completion",
    "CurrentTask",
    "Executor",
    "PostEvent",
    "Replaceable",
    "StepHandle",
    "TaskFunction",
    "ThreadExecutor",
]

_logger = logging.getLogger(__name__)


class Completion(Protocol):
    """Work that an asynchronous device has queued."""

    def wait(self) -> tuple[float, float]:
        """Block until the device has done it; when it began and ended, in seconds of ``time.perf_counter``."""


TaskFunction = Callable[[], Completion | None]
"""What a task computes. Returns ``None`` if it is done, else what to wait for."""


class PostEvent(Protocol):
    """Passes an event to the scheduler. Called on executor threads."""

    def __call__(self, event: Event, *, wake: bool = True) -> None:
        """Without ``wake`` the event waits until another one wakes the scheduler, which must follow soon."""


class StepHandle(Protocol):
    """What an executor needs to know of the step that a task belongs to."""

    number: int
    graph: TaskGraph
    aborted: bool
    """Once true, tasks that have not begun are dropped."""

    @property
    def tenant(self) -> object:
        """Whose step it is. An asynchronous device's tasks of different tenants do not wait for each other."""


class Assignment(NamedTuple):
    """One task for an executor."""

    step: StepHandle
    task: int
    function: TaskFunction
    awaited: bool = True
    """Whether another device waits for the task, so that the scheduler must hear of it at once."""


class Executor(Protocol):
    """Runs the tasks of one device."""

    def start(self, post: PostEvent) -> None:
        """Begin to accept tasks, and call ``post`` with what becomes of them."""

    def submit(self, assignments: Sequence[Assignment]) -> None:
        """Queue tasks behind those submitted before. Called on the loop's thread; must not block."""

    def close(self) -> None:
        """Accept no more tasks. Queued ones still run. May be called again, from any thread."""

    def join(self) -> None:
        """Wait until the last task has been reported."""


CompletionToken: TypeAlias = list[None]
"""Has one element until the task is reported or given up."""

CurrentTask: TypeAlias = tuple[StepHandle, int, float, CompletionToken]
"""The task that a thread is running: its step and number, when it began, and its token."""


@runtime_checkable
class Replaceable(Protocol):
    """An executor that has threads: it can abandon a hung task, and a tenant may leave it."""

    thread: int | None
    """The identifier of the thread that runs tasks, once it has started."""

    @property
    def running(self) -> Sequence[CurrentTask]:
        """What its threads run or wait for, the one that began first in front. May be read from any thread."""

    def give_up(self, current: CurrentTask, fail: Callable[[], None]) -> bool:
        """Abandon a hung task and continue with the next one; false if the task has just ended by itself.

        Called on the loop's thread. ``fail`` reports the failure of the task, before the next task begins, so that no
        other task of its step runs. The hung task runs on until it returns; its result is dropped.
        """

    def leave(self, tenant: object) -> None:
        """End the threads that only ``tenant`` uses, once they are done. From any thread; must not block."""


class ThreadExecutor:
    """One persistent thread for a device. If it is asynchronous, one more for each tenant waits for completions."""

    def __init__(self, device: str, *, on_start: Callable[[], None] | None = None) -> None:
        """``on_start`` runs first on the device's thread, for instance to set its intra-op threads."""
        self.device = device
        self._on_start = on_start
        self._completions = _Completions(f"asyncpipe {device} completions")
        self._tasks = _QueueThread(f"asyncpipe {device}")
        self._left: list[_QueueThread] = []
        """Of tenants that left; they end when they are done."""
        self._given_up: list[threading.Thread] = []

    @property
    def thread(self) -> int | None:
        """As ``Replaceable.thread``."""
        return None if self._tasks.thread is None else self._tasks.thread.ident

    @property
    def running(self) -> Sequence[CurrentTask]:
        """As ``Replaceable.running``: the running task, and the completions that are waited for."""
        found = [current for thread in self._threads() if (current := thread.state.current) is not None]
        return sorted(found, key=lambda current: current[2])

    def _threads(self) -> list[_QueueThread]:
        return [self._tasks, *self._completions.threads.values(), *self._left]

    def start(self, post: PostEvent) -> None:
        # The thread functions hold no reference to self: a dropped executor can be collected while its threads idle.
        self._completions.serve = partial(_wait_for_completions, post)
        self._tasks.serve = partial(_run_tasks, post, self._completions, self._on_start)
        self._tasks.start()

    def submit(self, assignments: Sequence[Assignment]) -> None:
        self._tasks.state.queue.put(assignments)

    def give_up(self, current: CurrentTask, fail: Callable[[], None]) -> bool:
        if not _take(current[3]):
            return False
        try:
            fail()
        finally:
            hung = next(thread for thread in self._threads() if thread.state.current is current)
            old = hung.replace()
            old.name += " (given up)"
            self._given_up = [*(thread for thread in self._given_up if thread.is_alive()), old]
        return True

    def leave(self, tenant: object) -> None:
        if (thread := self._completions.threads.pop(tenant, None)) is not None:
            self._left = [*(each for each in self._left if each.is_alive), thread]
            thread.state.queue.put(None)

    def close(self) -> None:
        self._tasks.state.queue.put(None)

    def join(self) -> None:
        if self._tasks.thread is not None:
            self._tasks.thread.join()  # It starts the others.
        for each in self._threads():
            if each.thread is not None:
                each.thread.join()
        if left := [thread.name for thread in self._given_up if thread.is_alive()]:
            _logger.warning("%d threads of tasks that were given up still run: %s", len(left), ", ".join(left))


class _QueueState:
    """What one thread works on. The queue outlives the thread: a successor takes it over."""

    def __init__(self, queue: SimpleQueue[Any], batch: deque[Assignment]) -> None:
        self.queue = queue
        self.batch = batch
        """The assignments that were taken from the queue and have not begun."""
        self.current: CurrentTask | None = None


class _QueueThread:
    """A thread that serves a queue, and can be replaced by another one while it hangs."""

    def __init__(self, name: str) -> None:
        self.state = _QueueState(SimpleQueue(), deque())
        self.thread: threading.Thread | None = None
        self.serve: Callable[[_QueueState], None]
        self._name = name

    def start(self) -> None:
        self.thread = threading.Thread(target=self.serve, args=(self.state,), name=self._name, daemon=True)
        self.thread.start()

    @property
    def is_alive(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def replace(self) -> threading.Thread:
        """Start a successor, and return the hung thread, which has lost its token."""
        assert self.thread is not None
        old, hung = self.thread, self.state
        self.state = _QueueState(hung.queue, hung.batch)
        hung.current = None
        self.start()
        return old


class _Completions:
    """The threads that wait for completions: one for each tenant, so that none waits behind another's kernel."""

    def __init__(self, name: str) -> None:
        self.threads: dict[object, _QueueThread] = {}
        self.serve: Callable[[_QueueState], None]
        self._name = name

    def put(self, item: tuple[StepHandle, int, Completion]) -> None:
        """Wait for one more. Called on the device's thread."""
        tenant = item[0].tenant
        thread = self.threads.get(tenant)
        if thread is None:
            thread = _QueueThread(self._name)
            thread.serve = self.serve
            thread.start()
            self.threads[tenant] = thread
        thread.state.queue.put(item)


def _run_tasks(
    post: PostEvent, completions: _Completions, on_start: Callable[[], None] | None, state: _QueueState
) -> None:
    """The function of a device's thread."""
    mark_thread()
    if on_start is not None:
        on_start()
    batch = state.batch
    while True:
        while batch:
            if not _run(state, batch.popleft(), post, completions):
                return
        if (assignments := state.queue.get()) is None:
            break
        batch.extend(assignments)
        # An idle thread must not keep the last step alive.
        del assignments
    for thread in list(completions.threads.values()):
        thread.state.queue.put(None)


def _run(state: _QueueState, assignment: Assignment, post: PostEvent, completions: _Completions) -> bool:
    """Run a task and report it; false if it was given up meanwhile."""
    step, task, function, awaited = assignment
    if step.aborted:
        post(TaskDropped(step.number, task))
        return True
    # Half of all tasks are copies that only the next task here waits for: they need no wake-up of their own. But the
    # last event of a step must not wait for a task of another job.
    wake = awaited or not state.batch or state.batch[0].step is not step
    token: CompletionToken = [None]
    started = time.perf_counter()
    state.current = (step, task, started, token)
    try:
        completion = function()
    except BaseException as error:  # noqa: BLE001 - reported: an exception that is lost would block the step for ever
        number = step.number
        # The traceback of the error holds this frame, and the step will hold the error.
        del assignment, step, function
        if not _take(token):
            return False
        _clear_frames(error)
        state.current = None
        post(TaskFailed(number, task, error))
        return True
    if not _take(token):
        return False
    state.current = None
    if completion is None:
        post(TaskCompleted(step.number, task, started, time.perf_counter()), wake=wake)
    else:
        post(TaskIssued(step.number, task, time.perf_counter() - started), wake=wake)
        completions.put((step, task, completion))
    return True


def _wait_for_completions(post: PostEvent, state: _QueueState) -> None:
    """The function of a thread that waits for a tenant's tasks on an asynchronous device, in the order of issue."""
    while (item := state.queue.get()) is not None:
        step, task, completion = item
        number = step.number
        token: CompletionToken = [None]
        state.current = (step, task, time.perf_counter(), token)
        event: Event
        try:
            started, ended = completion.wait()
        except BaseException as error:  # noqa: BLE001 - reported, as above
            _clear_frames(error)
            event = TaskFailed(number, task, error)
        else:
            event = TaskCompleted(number, task, started, ended)
        if not _take(token):
            return
        state.current = None
        post(event)
        del item, step, completion, event


def _clear_frames(error: BaseException) -> None:
    """Drop the local variables of the frames that raised ``error``, and the errors that led to it.

    They hold the tensors of the step, which would live as long as somebody keeps the error: on a device whose memory is
    full, until after the next attempt.
    """
    links: list[BaseException | None] = [error]
    seen: set[int] = set()
    while links:
        link = links.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            links += link.__cause__, link.__context__


def _take(token: CompletionToken) -> bool:
    """Take the token; false if it was taken before."""
    try:
        token.pop()
    except IndexError:
        return False
    return True
