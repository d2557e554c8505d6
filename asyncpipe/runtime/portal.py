"""The portal: an asyncio loop in a thread of its own, for callers without one, or with one that may block."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from asyncpipe.errors import PipelineClosedError
from asyncpipe.runtime.waiting import outlast

__all__ = ["PortalCall", "Portal", "new_event_loop"]

_T = TypeVar("_T")

_CLOSED = "the pipeline is closed: the loop that drove it has ended"

SIGNAL_SECONDS = 0.25
"""A signal that arrives just before a thread blocks on a lock is seen only when it wakes: so it wakes this often."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop event loop where uvloop is installed, else asyncio's own. Sets no policy."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class Portal:
    """A loop that runs in a daemon thread until ``close``.

    What it is asked to run then, or has not run to its end, raises ``PipelineClosedError``.
    """

    def __init__(self) -> None:
        self._loop = new_event_loop()
        self._door = _Door()
        self._thread = threading.Thread(
            target=_run_loop, args=(self._loop, self._door), name="asyncpipe loop", daemon=True
        )
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run ``coroutine`` on the portal's loop from a coroutine of another loop.

        Cancellation goes through to it, and this returns only when it has really ended.
        """
        call = PortalCall(self._loop, coroutine, self._door)
        future = asyncio.wrap_future(call.future)
        try:
            call.start()
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            call.cancel()
            await outlast(future)
            raise
        finally:
            # An exception holds the frames it passed; one that held it in turn would wait for the cycle collector.
            del call, future

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run ``coroutine`` on the portal's loop and block until it is done.

        Ctrl-C (any exception that a signal handler raises here) cancels the coroutine, waits for its clean
        end and is raised again; a second Ctrl-C no longer waits.
        """
        call = PortalCall(self._loop, coroutine, self._door)
        try:
            call.start()
            return call.wait()
        except BaseException:
            call.end()
            raise
        finally:
            del call  # As in `run`.

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> PortalCall[_T]:
        """Run ``coroutine`` on the portal's loop; ``wait`` for it later. Does not block."""
        call = PortalCall(self._loop, coroutine, self._door)
        call.start()
        return call

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call ``function`` on the portal's loop. Does not block. Raises ``RuntimeError`` if the portal is closed."""
        self._loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        """Stop the loop once its callbacks are done. May be called again, from any thread."""
        _post(self._loop, self._loop.stop)

    def join(self) -> None:
        """Wait for the thread, after ``close``; returns at once on the loop's own thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join()


class _Door:
    """Where calls wait for a portal's loop, which may end before it comes to them.

    Whoever takes a call out of ``waiting``, which is one instruction of the interpreter, begins it or ends it.
    """

    def __init__(self) -> None:
        self.waiting: set[PortalCall[Any]] = set()
        self.closed = False
        """Set on the loop's thread when the loop has been stopped."""


class PortalCall(Generic[_T]):
    """A coroutine on another thread's loop; ``future`` is done when the coroutine is, also if it is cancelled.

    ``asyncio.run_coroutine_threadsafe`` marks its future as cancelled at once, while the coroutine may go on.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _T], door: _Door | None = None
    ) -> None:
        """Without the ``door`` of a portal, the loop must not end before it has begun the call."""
        self.future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self.future.set_running_or_notify_cancel()
        self._loop = loop
        self._coroutine = coroutine
        self._door = door or _Door()
        self._door.waiting.add(self)
        self._task: asyncio.Task[_T] | None = None

    def wait(self) -> _T:
        """Block until the coroutine is done; its result. An exception of a signal handler (Ctrl-C) is raised here."""
        try:
            while not concurrent.futures.wait([self.future], timeout=SIGNAL_SECONDS).done:
                pass
            return self.future.result()
        finally:
            del self  # As in `Portal.run`.

    def end(self) -> None:
        """Cancel the coroutine, unless it is done, and block until it has ended."""
        if not self.future.done():
            self.cancel()
            concurrent.futures.wait([self.future])

    def start(self) -> None:
        """Have the loop start the coroutine."""
        if not _post(self._loop, self._start):
            self.refuse()

    def cancel(self) -> None:
        """Cancel the coroutine, even if ``start`` was interrupted before it reached the loop."""
        if not self._end(asyncio.CancelledError()):
            # A loop that is closed has ended it.
            _post(self._loop, self._cancel)

    def refuse(self) -> None:
        """End the coroutine with ``PipelineClosedError``, unless it has begun: the loop has been stopped."""
        self._end(PipelineClosedError(_CLOSED))

    def _start(self) -> None:
        if self._door.closed:
            self.refuse()
        elif self._take():
            self._task = self._loop.create_task(self._coroutine)
            self._task.add_done_callback(self._finish)

    def _take(self) -> bool:
        """Whether it had not begun; then it is the caller's."""
        try:
            self._door.waiting.remove(self)
        except KeyError:
            return False
        return True

    def _end(self, error: BaseException) -> bool:
        if taken := self._take():
            self._coroutine.close()
            self.future.set_exception(error)
        return taken

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _finish(self, task: asyncio.Task[_T]) -> None:
        if task.cancelled():
            self.future.set_exception(PipelineClosedError(_CLOSED) if self._door.closed else asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())


def _post(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> bool:
    """Call ``function`` on ``loop``; false if that is closed. What is posted to a loop that ends may be dropped."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True


def _run_loop(loop: asyncio.AbstractEventLoop, door: _Door) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        door.closed = True
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
        # Whoever comes from here on is told by the loop.
        for call in list(door.waiting):
            call.refuse()
