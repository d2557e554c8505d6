"""The executor of a pipeline: one persistent thread per device runs tasks and programs, in order.

If the device is asynchronous, one more thread for each tenant waits for completions, so that none of them waits behind
another's kernel.

Python cannot kill a thread. A hung task is therefore abandoned: a new thread takes over the queue, and whatever the old
thread reports later is ignored::

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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from asyncpipe.runtime import device_thread
from asyncpipe.runtime.arrivals import Take
from asyncpipe.runtime.device_thread import AwaitedCompletion, CompletionWork, DeviceWork, Item
from asyncpipe.runtime.executor import Assignment, CurrentTask, PostEvent
from asyncpipe.runtime.program_run import Message, ProgramRun
from asyncpipe.runtime.task_board import TaskBoard
from asyncpipe.runtime.task_threads import mark_thread

__all__ = ["ThreadExecutor"]

_logger = logging.getLogger(__name__)

_Work = TypeVar("_Work", DeviceWork, CompletionWork)


class ThreadExecutor:
    """``Executor``, ``JoinsInTime``, ``Replaceable``, ``RunsPrograms`` and ``Listens`` for a device."""

    def __init__(
        self, device: str, *, on_start: Callable[[], None] | None = None, board: TaskBoard | None = None
    ) -> None:
        """``on_start`` runs first on the device's thread, for instance to set its intra-op threads.

        ``board`` shows to another process what the threads run.
        """
        self.device = device
        self._board = board
        self._on_start = on_start
        self._tasks: _ReplaceableThread[DeviceWork] | None = None
        self._completions: _CompletionThreads | None = None
        self._left: list[_ReplaceableThread[CompletionWork]] = []
        """Of tenants that left; they end when they are done."""
        self._given_up: list[threading.Thread] = []

    @property
    def thread(self) -> int | None:
        """As ``Replaceable.thread``."""
        return None if self._tasks is None else self._tasks.thread.ident

    @property
    def running(self) -> Sequence[CurrentTask]:
        """As ``Replaceable.running``: the running task, and the completions that are waited for."""
        found = [current for thread in self._threads() if (current := thread.work.current) is not None]
        return sorted(found, key=lambda current: current[2])

    def _threads(self) -> list[_ReplaceableThread[DeviceWork] | _ReplaceableThread[CompletionWork]]:
        if self._tasks is None or self._completions is None:
            return []
        return [self._tasks, *self._completions.threads.values(), *self._left]

    def start(self, post: PostEvent) -> None:
        # The thread functions hold no reference to self: a dropped executor can be collected while its threads idle.
        self._completions = _CompletionThreads(f"asyncpipe {self.device} completions", post, self._board)
        work = DeviceWork(post, self._completions, None if self._board is None else self._board.slot())
        serve = partial(_serve_device, self._completions, self._on_start)
        self._tasks = _ReplaceableThread(f"asyncpipe {self.device}", work, serve)

    def submit(self, assignments: Sequence[Assignment]) -> None:
        self._put(list(assignments))

    def submit_program(self, run: ProgramRun) -> None:
        self._put(run)

    def send(self, message: Message) -> None:
        self._put(message)

    def _put(self, item: Item) -> None:
        assert self._tasks is not None
        self._tasks.work.put(item)

    def listen(self, descriptor: int, take: Take) -> None:
        """As ``Listens.listen``."""
        assert self._tasks is not None
        self._tasks.work.arrivals().add(descriptor, take)

    def ignore(self, descriptor: int, take: Take) -> None:
        """As ``Listens.ignore``."""
        assert self._tasks is not None
        self._tasks.work.arrivals().discard(descriptor, take)

    def give_up(self, current: CurrentTask, fail: Callable[[], None]) -> bool:
        if not device_thread.claim(current[3]):
            return False
        try:
            fail()
        finally:
            # By the token: the tuple is another one if the task was held up.
            hung = next(
                thread
                for thread in self._threads()
                if (other := thread.work.current) is not None and other[3] is current[3]
            )
            old = hung.replace()
            old.name += " (given up)"
            self._given_up = [*(thread for thread in self._given_up if thread.is_alive()), old]
        return True

    def leave(self, tenant: object) -> None:
        if self._completions is not None and (thread := self._completions.threads.pop(tenant, None)) is not None:
            self._left = [*(each for each in self._left if each.thread.is_alive()), thread]
            thread.work.queue.put(None)

    def close(self) -> None:
        if self._tasks is not None:
            self._put(None)

    def join(self) -> None:
        if self._tasks is not None:
            self._tasks.thread.join()  # It starts the others.
        for each in self._threads():
            each.thread.join()
        if left := [thread.name for thread in self._given_up if thread.is_alive()]:
            _logger.warning("%d threads of tasks that were given up still run: %s", len(left), ", ".join(left))

    def join_within(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        if self._tasks is not None:
            self._tasks.thread.join(seconds)
        for each in self._threads():
            each.thread.join(max(0.0, until - time.monotonic()))


class _ReplaceableThread(Generic[_Work]):
    """A thread that serves a queue, and can be replaced by another one while it hangs."""

    def __init__(self, name: str, work: _Work, serve: Callable[[_Work], None]) -> None:
        """Starts it."""
        self.work: _Work = work
        self._name = name
        self._serve: Callable[[_Work], None] = serve
        self.thread = self._start()

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._serve, args=(self.work,), name=self._name, daemon=True)
        thread.start()
        return thread

    def replace(self) -> threading.Thread:
        """Start a successor, and return the hung thread, which has lost its token."""
        hung = self.thread
        self.work = self.work.successor()
        self.thread = self._start()
        return hung


class _CompletionThreads:
    """``Completions``: the threads that wait for them, by tenant."""

    def __init__(self, name: str, post: PostEvent, board: TaskBoard | None) -> None:
        self.threads: dict[object, _ReplaceableThread[CompletionWork]] = {}
        self._name = name
        self._post = post
        self._board = board

    def put(self, item: AwaitedCompletion) -> None:
        tenant = item[0].tenant
        if tenant not in self.threads:
            work = CompletionWork(self._post, None if self._board is None else self._board.slot())
            serve = partial(_serve_completions, self._board)
            self.threads[tenant] = _ReplaceableThread(self._name, work, serve)
        self.threads[tenant].work.queue.put(item)

    def close(self) -> None:
        """Let every thread end once it is done."""
        for thread in list(self.threads.values()):
            thread.work.queue.put(None)


def _serve_device(completions: _CompletionThreads, on_start: Callable[[], None] | None, work: DeviceWork) -> None:
    """The function of a device's thread."""
    mark_thread()
    if on_start is not None:
        on_start()
    if work.serve():
        completions.close()
        work.close()


def _serve_completions(board: TaskBoard | None, work: CompletionWork) -> None:
    """The function of a thread that waits for completions."""
    if work.serve() and board is not None and work.slot is not None:
        board.give_back(work.slot)
