"""The portal: an asyncio loop in a thread of its own, which drives steps for callers on any loop and any thread."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from asyncpipe.errors import NestedWaitError, PipelineClosedError
from asyncpipe.runtime.process import Process
from asyncpipe.runtime.waits import Waiting, drive, drive_blocking

__all__ = [
    "EXIT_SECONDS",
    "Ended",
    "Portal",
    "PortalCall",
    "block_until_done",
    "new_event_loop",
    "wait_uncancelled",
    "whole",
]

_T = TypeVar("_T")

_CLOSED = "the pipeline is closed: the loop that drove it has ended"
_OWN_THREAD = (
    "this thread drives the pipeline's steps (is this an observer?), so it cannot wait for them; use another thread"
)

EXIT_SECONDS = 5.0
"""For threads to end, when the interpreter does. One that something blocks for ever must not keep it from ending."""

SIGNAL_SECONDS = 0.25
"""Python runs a signal handler only when the main thread wakes. A thread that blocks on a lock wakes this often."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop event loop if uvloop is installed, else asyncio's own. Sets no policy."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def wait_uncancelled(future: asyncio.Future[Any]) -> None:
    """Wait until ``future`` is done, even if the caller is cancelled meanwhile. Raises nothing.

    For the end of a step whose tensors are still used by other threads. The caller raises ``CancelledError`` after it.
    """
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue


def block_until_done(future: concurrent.futures.Future[Any]) -> None:
    """Block until ``future`` is done; a signal handler (Ctrl-C) may raise here."""
    while not concurrent.futures.wait([future], timeout=SIGNAL_SECONDS).done:
        pass


class Portal:
    """A loop that runs in a daemon thread until ``close``, or until the interpreter ends.

    Coroutines that have not ended by then, and later ones, raise ``PipelineClosedError``. So does every wait in a
    forked child, which has neither the thread nor the right to wake the loop.
    """

    def __init__(self) -> None:
        self.loop = new_event_loop()
        self._pending = _PendingCalls()
        self._is_stopped = False
        self._thread = threading.Thread(
            target=_run_loop, args=(self.loop, self._pending), name="asyncpipe loop", daemon=True
        )
        self._thread.start()
        _running.add(self)

    async def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run ``coroutine`` on the portal's loop, from a coroutine of another loop.

        A cancellation is passed on to ``coroutine``, and this returns only when that has ended.
        """
        return await drive(whole(self.submit(coroutine)))

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run ``coroutine`` on the portal's loop and block until it has ended.

        Ctrl-C (any exception that a signal handler raises here) cancels the coroutine, waits for its end and is then
        raised. A second Ctrl-C does not wait.
        """
        return drive_blocking(whole(self.submit(coroutine)))

    def check_thread(self) -> None:
        """Raise ``NestedWaitError`` on the portal's own thread, which cannot wait for what it is to run."""
        if threading.current_thread() is self._thread:
            raise NestedWaitError(_OWN_THREAD)

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> PortalCall[_T]:
        """Start ``coroutine`` on the portal's loop, to wait for it later. Does not block."""
        call = PortalCall(self.loop, coroutine, self._pending)
        call.start()
        return call

    def close(self) -> None:
        """Stop the loop after the callbacks that are queued. May be called again, from any thread."""
        self._pending.post(self.loop, self._stop)

    def join(self, seconds: float | None = None) -> None:
        """Wait for the thread, after ``close``; at most so long. Returns at once on the portal's own thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def _stop(self) -> None:
        if not self._is_stopped:  # Else the loop runs once more, for what is cancelled.
            self._is_stopped = True
            self.loop.stop()

    @property
    def is_here(self) -> bool:
        """Whether its thread is one of this process, and runs."""
        return self._pending.process.is_this and self._thread.is_alive()


class _RunningPortals:
    """Those whose threads may run. They are ended before the interpreter, which would take the loops apart with it."""

    def __init__(self) -> None:
        self._portals: list[Portal] = []
        self._is_hooked = False

    def add(self, portal: Portal) -> None:
        if not self._is_hooked:  # When the first one is made, and not at the import.
            self._is_hooked = True
            atexit.register(self._end)
        for each in [each for each in self._portals if not each.is_here]:
            with suppress(ValueError):  # Another thread was faster.
                self._portals.remove(each)
        self._portals.append(portal)  # Held as long as its thread runs, whoever drops it.

    def _end(self) -> None:
        portals = [each for each in self._portals if each.is_here]
        for portal in portals:
            portal.close()
        until = time.monotonic() + EXIT_SECONDS
        for portal in portals:
            portal.join(max(0.0, until - time.monotonic()))


_running = _RunningPortals()


class _PendingCalls:
    """The calls that a loop has not begun yet, and whether it still will.

    Several threads may want to begin, cancel or refuse the same call. The one that removes it from ``calls`` does; a
    set's ``remove`` is atomic under the GIL.
    """

    def __init__(self) -> None:
        self.process = Process()
        self.calls: set[PortalCall[Any]] = set()
        self.closed = False
        """Set on the loop's thread when the loop has been stopped."""

    def post(self, loop: asyncio.AbstractEventLoop, function: Callable[..., object]) -> bool:
        """Call ``function`` on ``loop``; false if that is closed, or this is a forked child, whose parent's loop it is.

        A loop that is being closed may drop the call.
        """
        if not self.process.is_this:
            return False
        try:
            loop.call_soon_threadsafe(function)
        except RuntimeError:
            if not loop.is_closed():
                raise
            return False
        return True


class PortalCall(Generic[_T]):
    """A coroutine on another thread's loop. ``future`` is done when the coroutine has ended, even if by cancellation.

    ``asyncio.run_coroutine_threadsafe`` instead marks its future as cancelled while the coroutine may still run.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _T], pending: _PendingCalls | None = None
    ) -> None:
        """Without ``pending``, of a portal, the loop must not end before it has begun the call."""
        self.future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self.future.set_running_or_notify_cancel()
        self._loop = loop
        self._coroutine = coroutine
        self._pending = pending or _PendingCalls()
        self._pending.calls.add(self)
        self._task: asyncio.Task[_T] | None = None

    async def awaited(self) -> _T:
        """Wait until the coroutine has ended, and return its result. A cancellation ends this wait alone."""
        self._pending.process.check()
        future = asyncio.wrap_future(self.future)
        try:
            future.add_done_callback(_retrieve)  # Whoever waits may be cancelled; asyncio would say that nobody cared.
            return await asyncio.shield(future)
        finally:
            # The traceback of an exception holds this frame, which must not hold the exception in turn.
            del self, future

    def wait(self) -> _T:
        """Block until the coroutine has ended, and return its result. A signal handler (Ctrl-C) may raise here.

        Raises ``NestedWaitError`` on the loop's own thread.
        """
        self._pending.process.check()
        try:
            if self.is_here:
                raise NestedWaitError(_OWN_THREAD)
            block_until_done(self.future)
            return self.future.result()
        finally:
            del self  # as above

    @property
    def is_here(self) -> bool:
        """Whether this is the thread of the loop, which cannot wait for what it is to run."""
        return asyncio._get_running_loop() is self._loop

    @property
    def is_pending(self) -> bool:
        """Whether the coroutine has not ended, in the process that has begun it."""
        return self._pending.process.is_this and not self.future.done()

    def end(self) -> None:
        """Cancel the coroutine unless it has ended, and block until it has."""
        if self.is_pending:
            self.cancel()
            Ended(self).wait()

    def start(self) -> None:
        """Start the coroutine on the loop."""
        if not self._pending.post(self._loop, self._start):
            self.refuse()

    def cancel(self) -> None:
        """Cancel the coroutine, even if ``start`` was interrupted before it reached the loop."""
        if not self._end_unstarted(asyncio.CancelledError()):
            # If the loop is closed, the coroutine has ended.
            self._pending.post(self._loop, self._cancel_task)

    def refuse(self) -> None:
        """End the coroutine with ``PipelineClosedError``, unless it has begun. The loop has been stopped."""
        self._end_unstarted(PipelineClosedError(_CLOSED))

    def _start(self) -> None:
        if self._pending.closed:
            self.refuse()
        elif self._take():
            self._task = self._loop.create_task(self._coroutine)
            self._task.add_done_callback(self._finish)

    def _take(self) -> bool:
        """Whether the coroutine has not begun. Only one caller gets true, and must begin or end it."""
        try:
            self._pending.calls.remove(self)
        except KeyError:
            return False
        return True

    def _end_unstarted(self, error: BaseException) -> bool:
        if taken := self._take():
            self._coroutine.close()
            self.future.set_exception(error)
        return taken

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _finish(self, task: asyncio.Task[_T]) -> None:
        if task.cancelled():
            closed = self._pending.closed
            self.future.set_exception(PipelineClosedError(_CLOSED) if closed else asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())


class Ended:
    """Waits until a call has ended, however; even if a coroutine that waits is cancelled meanwhile. Raises nothing."""

    def __init__(self, call: PortalCall[Any]) -> None:
        self._call = call

    async def awaited(self) -> None:
        if self._call.is_pending:
            future = asyncio.wrap_future(self._call.future)
            future.add_done_callback(_retrieve)
            await wait_uncancelled(future)

    def wait(self) -> None:
        if self._call.is_pending and not self._call.is_here:
            concurrent.futures.wait([self._call.future])


def whole(call: PortalCall[_T]) -> Waiting[_T]:
    """The result of ``call``. What ends the wait early cancels the call, and is raised when that has ended."""
    try:
        return (yield call)  # type: ignore[no-any-return]
    except BaseException:
        if call.is_pending:
            call.cancel()
            yield Ended(call)
        raise
    finally:
        del call  # as in ``PortalCall.awaited``


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def _run_loop(loop: asyncio.AbstractEventLoop, pending: _PendingCalls) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        pending.closed = True
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
        # Calls that are made from now on see that the loop is closed.
        for call in list(pending.calls):
            call.refuse()
