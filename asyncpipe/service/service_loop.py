"""The loop on which a service trains, for callers on any loop: what is asked of it, and whether it still answers.

::

    the host's loop ── do: carried out also if the caller is cancelled ───┐
                    ── hop: cancelled with its caller ────────────────────┴──▶ the service's loop
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from threading import Lock
from typing import Any, TypeVar

from asyncpipe.errors import AsyncpipeError
from asyncpipe.runtime.portal import Portal, PortalCall, wait_uncancelled
from asyncpipe.train.blocking_calls import in_thread

__all__ = ["ServiceDrainingError", "ServiceLoop"]

_T = TypeVar("_T")

BEAT_SECONDS = 1.0


class ServiceDrainingError(AsyncpipeError, RuntimeError):
    """The service is not open, or is shutting down and takes no more jobs; the message says which."""


class ServiceLoop:
    """The loop of one service: one in a thread of its own, or that of who opens it. Opens and closes once."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._portal: Portal | None = None
        self._requests: set[asyncio.Task[Any]] = set()
        """Requests of callers on the loop itself that have not ended."""
        self._calls: set[Future[Any]] = set()
        """Calls from other loops that have not ended."""
        self._calling = Lock()
        self._is_closed = False
        self._last_beat = 0.0
        self._beating: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether it was opened, also if it is closed by now."""
        return self._loop is not None

    @property
    def requests(self) -> int:
        """How many requests of callers on the loop itself have not ended."""
        return len(self._requests)

    def open(self, *, own: bool) -> None:
        """Take the running loop, or start one in a thread if ``own``."""
        if own:
            self._portal = Portal()
            self._loop = self._portal.loop
        else:
            self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Take no more calls, wait for those that are under way, and end a loop of its own."""
        with self._calling:
            self._is_closed = True
            calls = [asyncio.wrap_future(call) for call in self._calls]
        if calls:  # Followers, which end now that their logs are closed.
            await asyncio.wait(calls)
        if self._portal is not None:
            self._portal.close()
            await in_thread(self._portal.join)

    # Asking

    async def do(self, request: Coroutine[Any, Any, _T]) -> _T:
        """Carry out ``request`` on the loop, also if the caller is cancelled meanwhile."""
        if asyncio.get_running_loop() is self._loop:
            task = asyncio.create_task(request)
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)
            return await asyncio.shield(task)
        return await asyncio.shield(asyncio.wrap_future(self._call(request).future))

    async def hop(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Await ``coroutine`` on the loop; a cancellation of the caller cancels it."""
        if asyncio.get_running_loop() is self._loop:
            return await coroutine
        call = self._call(coroutine)
        future = asyncio.wrap_future(call.future)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            call.cancel()
            await wait_uncancelled(future)
            future.cancelled() or future.exception()  # Retrieved: the cancellation is what the caller learns.
            raise
        finally:
            # An exception refers to this frame; the frame must not refer to the exception, or both wait for the cycle
            # collector.
            del call, future

    async def finish_requests(self) -> None:
        """Wait for the requests of callers on the loop itself. On the loop."""
        if self._requests:
            await asyncio.wait(self._requests)

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> PortalCall[_T]:
        """Start ``coroutine`` on the loop, from another one."""
        assert self._loop is not None
        with self._calling:
            if self._is_closed:
                coroutine.close()
                raise ServiceDrainingError("the service is closed")
            call = PortalCall(self._loop, coroutine)
            self._calls.add(call.future)
            call.future.add_done_callback(self._calls.discard)
            call.start()
        return call

    # Whether it answers

    def beat(self) -> None:
        """Note that the loop runs, now and every second from now on. On the loop."""
        self._last_beat = time.monotonic()
        self._beating = asyncio.get_running_loop().call_later(BEAT_SECONDS, self.beat)

    def beat_no_more(self) -> None:
        """End ``beat``. On the loop."""
        if self._beating is not None:
            self._beating.cancel()

    def silence(self) -> float:
        """Seconds since the loop is known to have run; 0 for a caller on it. From any thread."""
        try:
            if asyncio.get_running_loop() is self._loop:
                return 0.0
        except RuntimeError:
            pass
        return time.monotonic() - self._last_beat
