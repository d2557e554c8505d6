"""The portal: an asyncio loop in a thread of its own, for callers without one, or with one that may block."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from asyncpipe.runtime.waiting import outlast

__all__ = ["Call", "Portal", "new_event_loop"]

_T = TypeVar("_T")

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
    """A loop that runs in a daemon thread until ``close``."""

    def __init__(self) -> None:
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="asyncpipe loop", daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run ``coroutine`` on the portal's loop from a coroutine of another loop.

        Cancellation goes through to it, and this returns only when it has really ended.
        """
        call = Call(self._loop, coroutine)
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
        call = Call(self._loop, coroutine)
        try:
            call.start()
            return call.wait()
        except BaseException:
            call.end()
            raise
        finally:
            del call  # As in `run`.

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> Call[_T]:
        """Run ``coroutine`` on the portal's loop; ``wait`` for it later. Does not block.

        Raises ``RuntimeError`` if the portal is closed.
        """
        call = Call(self._loop, coroutine)
        try:
            call.start()
        except RuntimeError:
            coroutine.close()
            raise
        return call

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call ``function`` on the portal's loop. Does not block."""
        self._loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        """Stop the loop once its callbacks are done. May be called again, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)

    def join(self) -> None:
        """Wait for the thread, after ``close``; returns at once on the loop's own thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join()


class Call(Generic[_T]):
    """A coroutine on another thread's loop; ``future`` is done when the coroutine is, also if it is cancelled.

    ``asyncio.run_coroutine_threadsafe`` marks its future as cancelled at once, while the coroutine may go on.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _T]) -> None:
        self.future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self.future.set_running_or_notify_cancel()
        self._loop = loop
        self._coroutine = coroutine
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
        self._loop.call_soon_threadsafe(self._start)

    def cancel(self) -> None:
        """Cancel the coroutine, even if ``start`` was interrupted before it reached the loop."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._finish)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.future.done():
            self._coroutine.close()
            self.future.set_exception(asyncio.CancelledError())

    def _finish(self, task: asyncio.Task[_T]) -> None:
        if task.cancelled():
            self.future.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
