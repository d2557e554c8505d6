"""What a device's thread does: single tasks as they come, and programs as far as they get.

Everything reaches the thread by one queue, in which it also waits; in a worker it waits for messages of others at the
same time (``arrivals.py``). A program that has to wait for another device gives way to what has come meanwhile::

    queue ──▶ assignments ──▶ run, in the order in which they came
          ──▶ programs    ──▶ the first one that can go on runs, until it has to wait
          ──▶ messages    ──▶ a task of a program waits for one thing less

A task is run in one way, whoever handed it over (``DeviceWork._run``).
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol

from asyncpipe.core.engine.events import TaskCompleted, TaskFailed, TaskIssued
from asyncpipe.runtime.arrivals import Arrivals
from asyncpipe.runtime.executor import (
    Assignment,
    Completion,
    CompletionToken,
    CurrentTask,
    PostEvent,
    StepHandle,
    TaskFunction,
)
from asyncpipe.runtime.program_run import FREE_SLOT, Message, ProgramRun
from asyncpipe.runtime.task_board import TaskSlot

__all__ = ["AwaitedCompletion", "CompletionWork", "Completions", "DeviceWork", "Item", "claim", "hold_up"]

Item = list[Assignment] | ProgramRun | Message | None
"""What comes by the queue; ``None`` ends the thread when it has nothing left to do."""

LONGEST_HOLD_UP = 3600.0
"""Seconds for which a task may be held up before its time counts again: compiling a large stage takes minutes."""

AwaitedCompletion = tuple[StepHandle, int, Completion, ProgramRun | None]
"""A task that an asynchronous device has queued: its step and number, what to wait for, and its program's run."""


class Completions(Protocol):
    """Where tasks go that an asynchronous device has queued."""

    def put(self, item: AwaitedCompletion) -> None:
        """Wait for one more. Called on the device's thread."""


class _Inbox:
    """What has come by a device's queue and is not done. It outlives the thread."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Item] = SimpleQueue()
        self.batch: deque[Assignment] = deque()
        """Single tasks that have not begun."""
        self.runs: list[ProgramRun] = []
        """Programs that are not at their end, oldest first."""
        self.is_closing = False
        self.arrivals: Arrivals | None = None
        """What else the thread waits for, once there is something."""


class DeviceWork:
    """What one device's thread works on, until a successor takes over."""

    def __init__(
        self, post: PostEvent, completions: Completions, slot: TaskSlot | None = None, inbox: _Inbox | None = None
    ) -> None:
        """``slot`` shows what runs to another process."""
        self.current: CurrentTask | None = None
        """The running task. Read from other threads."""
        self._post = post
        self._slot = slot
        self._held = 0.0
        """Seconds for which the running task was held up."""
        self._held_since: float | None = None
        self._completions = completions
        self._inbox = inbox or _Inbox()
        self._batch, self._runs = self._inbox.batch, self._inbox.runs
        self.queue = self._inbox.queue

    def put(self, item: Item) -> None:
        """Let the thread have ``item``. From any thread; never blocks."""
        self.queue.put(item)
        if (arrivals := self._inbox.arrivals) is not None:
            arrivals.ring()

    def arrivals(self) -> Arrivals:
        """What the thread waits for besides the queue, from now on. On the loop's thread."""
        if self._inbox.arrivals is None:
            self._inbox.arrivals = Arrivals()
            self.queue.put([])  # It may wait for the queue alone.
        return self._inbox.arrivals

    def close(self) -> None:
        """The thread has ended, and its queue is empty."""
        if (arrivals := self._inbox.arrivals) is not None:
            self._inbox.arrivals = None
            arrivals.close()

    def successor(self) -> DeviceWork:
        """What the next thread works on, if this one hangs in a task that was given up."""
        self.current = None
        return DeviceWork(self._post, self._completions, self._slot, self._inbox)

    def serve(self) -> bool:
        """Work until the queue has brought ``None`` and nothing is left; false if a task was given up meanwhile."""
        _here.work = self
        while True:
            run = self._able()
            if self._batch:
                # By turns with programs: a lane that jobs share is handed its next task before this one has ended.
                if not self._run_assignment() or (run is not None and not self._advance(run)):
                    return False
            elif run is not None:
                if not self._advance(run):
                    return False
            elif self._inbox.is_closing and not self._runs:
                return True
            else:
                self._receive(self._next())
            del run  # It must not live while this waits.
            if self._batch and (arrivals := self._inbox.arrivals) is not None:
                # Between two tasks that the scheduler has chosen, which may choose what arrives.
                arrivals.look()
            while not self.queue.empty():
                self._receive(self.queue.get_nowait())

    def hold_up(self, is_held: bool) -> None:
        """The running task is held up from now on, or not any more; on its thread. Its time begins behind that."""
        now = time.perf_counter()
        if is_held and self._held_since is None:
            self._held_since, shown = now, now + LONGEST_HOLD_UP
        elif not is_held and self._held_since is not None:
            self._held += now - self._held_since
            self._held_since, shown = None, now
        else:
            return
        if (current := self.current) is not None:
            step, task, _, token = self.current = (current[0], current[1], shown, current[3])
            if self._slot is not None and token:
                self._slot.show(step.number, task, shown)

    def _next(self) -> Item:
        """What comes next by the queue, which is waited for."""
        while True:
            arrivals = self._inbox.arrivals
            if arrivals is None:
                return self.queue.get()
            with suppress(Empty):
                return self.queue.get_nowait()
            arrivals.wait(self._has_items)

    def _has_items(self) -> bool:
        return not self.queue.empty()

    def _receive(self, item: Item) -> None:
        if isinstance(item, tuple):
            run, place = item
            run.receive(place)
        elif isinstance(item, ProgramRun):
            self._runs.append(item)
        elif item is not None:
            self._batch.extend(item)
        else:
            self._inbox.is_closing = True

    def _able(self) -> ProgramRun | None:
        return next((run for run in self._runs if run.can_go_on), None)

    # Single tasks

    def _run_assignment(self) -> bool:
        """Run the oldest single task; false if it was given up meanwhile."""
        step, task, function, awaited = self._batch.popleft()
        if step.abort.is_requested:
            step.abort.drop(self._post, task)
            return True
        # Half of all tasks are copies that only the next task here waits for: they need no wake-up of their own. But
        # the last event of a step must not wait for a task of another job.
        wake = awaited or not self._batch or self._batch[0].step is not step
        return self._run(step, task, function, wake=wake)

    # Programs

    def _advance(self, run: ProgramRun) -> bool:
        """Run tasks of ``run`` until it waits or is over, or something else came; false if one was given up."""
        if run.is_over:
            self._runs.remove(run)
            # Nothing here refers to the step when others hear of its end.
            self._post(run.end(), at=time.perf_counter())
            return True
        step, entered = run.step, False
        try:
            while run.can_go_on and not run.is_over:
                if not entered:
                    entered = self._enter(run)
                    continue
                position = run.position
                run.position += 1
                if not self._run(step, run.program.tasks[position], None, run):
                    entered = False  # This thread ends with the task.
                    return False
                run.release(position)
                while not self.queue.empty():
                    self._receive(self.queue.get_nowait())
                if self._batch:
                    return True
                if not run.can_go_on and len(self._runs) == 1 and not self._inbox.is_closing:
                    # Nothing else is to be done here.
                    self._receive(self._next())
            return True
        finally:
            if entered:
                # A device that fails here has failed a task of the step already.
                with suppress(RuntimeError):
                    run.surroundings.__exit__(None, None, None)
            # This frame called the one that the traceback of an error holds, and the step will hold the error.
            del run, step

    def _enter(self, run: ProgramRun) -> bool:
        """Enter the surroundings of ``run``; if that fails, its next task has."""
        try:
            run.surroundings.__enter__()
        except BaseException as error:  # noqa: BLE001 - reported, as in ``_run``
            abort, task = run.abort, run.program.tasks[run.position]
            run.position += 1
            del run
            clear_frames(error)
            abort.request(self._post, TaskFailed(abort.number, task, error), time.perf_counter())
            del abort
            return False
        return True

    # Every task

    def _run(
        self,
        step: StepHandle,
        task: int,
        function: TaskFunction | None,
        run: ProgramRun | None = None,
        *,
        wake: bool = False,
    ) -> bool:
        """Run a task of the program ``run``, or ``function``, and report it; false if it was given up meanwhile."""
        token: CompletionToken = [None]
        started = time.perf_counter()
        self._held = 0.0
        self.current = (step, task, started, token)
        if self._slot is not None:
            self._slot.show(step.number, task, started)
        try:
            if run is not None:
                completion = run.call(task)
            else:
                assert function is not None
                completion = function()
        except BaseException as error:  # noqa: BLE001 - reported: an exception that is lost would block the step
            if not claim(token):
                return False
            if self._slot is not None:
                self._slot.clear()
            abort, at = step.abort, None if run is None else time.perf_counter()
            # The traceback of the error holds this frame, and the step will hold the error.
            del step, function, run
            clear_frames(error)
            self.current = None
            # What this device was handed with the task may depend on it, an update of half the gradients for instance.
            abort.request(self._post, TaskFailed(abort.number, task, error), at)
            del abort
            return True
        ended = time.perf_counter()
        started += self._held
        if not claim(token):
            return False
        self.current = None
        if self._slot is not None:
            self._slot.clear()
        at = None if run is None else ended
        if completion is None:
            self._post(TaskCompleted(step.number, task, started, ended), wake=wake, at=at)
        else:
            if run is not None:
                run.use_slot()
            self._post(TaskIssued(step.number, task, ended - started), wake=wake, at=at)
            self._completions.put((step, task, completion, run))
        return True


class CompletionWork:
    """What a thread works on that waits for one tenant's tasks on an asynchronous device, in the order of issue."""

    def __init__(
        self,
        post: PostEvent,
        slot: TaskSlot | None = None,
        queue: SimpleQueue[AwaitedCompletion | None] | None = None,
    ) -> None:
        """``slot`` as in ``DeviceWork``."""
        self.queue = queue or SimpleQueue()
        self.current: CurrentTask | None = None
        """The task that is waited for. Read from other threads."""
        self.slot = slot
        self._post = post

    def successor(self) -> CompletionWork:
        """As ``DeviceWork.successor``."""
        self.current = None
        return CompletionWork(self._post, self.slot, self.queue)

    def serve(self) -> bool:
        """As ``DeviceWork.serve``."""
        while (item := self.queue.get()) is not None:
            step, task, completion, run = item
            abort, number, failure = step.abort, step.number, None
            token: CompletionToken = [None]
            began = time.perf_counter()
            self.current = (step, task, began, token)
            if self.slot is not None:
                self.slot.show(number, task, began)
            try:
                started, ended = completion.wait()
            except BaseException as error:  # noqa: BLE001 - reported, as above
                clear_frames(error)
                failure = TaskFailed(number, task, error)
            if not claim(token):
                return False
            self.current = None
            if self.slot is not None:
                self.slot.clear()
            at = None if run is None else time.perf_counter()
            if failure is not None:
                abort.request(self._post, failure, at)
            if run is not None:
                run.send(FREE_SLOT)
            if failure is None:
                # The last event of a step must not wait for a task of the next one.
                last = run is None or abort.is_requested or task == run.program.tasks[-1]
                self._post(TaskCompleted(number, task, started, ended), wake=last or self.queue.empty(), at=at)
            del item, step, completion, run, abort, failure
        return True


class _Here(threading.local):
    """What the calling thread works on."""

    work: DeviceWork | None = None


_here = _Here()


def hold_up(is_held: bool) -> None:
    """The task that the calling thread runs is held up by something that is none of its own, or not any more."""
    if (work := _here.work) is not None:
        work.hold_up(is_held)


def clear_frames(error: BaseException) -> None:
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


def claim(token: CompletionToken) -> bool:
    """Pop the token; false if somebody else did before."""
    try:
        token.pop()
    except IndexError:
        return False
    return True
