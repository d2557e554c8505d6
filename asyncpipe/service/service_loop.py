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
from asyncpipe.runtime.portal import Portal, PortalCall, whole
from asyncpipe.runtime.waits import drive
from asyncpipe.train.blocking_calls import in_thread

__all__ = ["ServiceDrainingError", "ServiceLoop"]

_T = TypeVar("_T")

BEAT_SECONDS = 1.0


class ServiceDrainingError(AsyncpipeError, RuntimeError):
    """The service is not open, or is shutting down and takes no more jobs; the message says which."""


class ServiceLoop:
    """The loop of one service, in a thread of its own. Opens and closes once."""

    def __init__(self) -> None:
        self._portal: Portal | None = None
        self._calls: set[Future[Any]] = set()
        """Calls from other loops that have not ended."""
        self._calling = Lock()
        self._is_closed = False
        self._last_beat = 0.0
        self._beating: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether it was opened, also if it is closed by now."""
        return self._portal is not None

    def open(self) -> None:
        """Start the loop."""
        self._portal = Portal()

    async def close(self) -> None:
        """Take no more calls, wait for those that are under way, and end the loop."""
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
        """Carry out ``request`` on the loop, for a caller on another one, also if the caller is cancelled meanwhile."""
        return await asyncio.shield(asyncio.wrap_future(self._call(request).future))

    async def hop(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Await ``coroutine`` on the loop, for a caller on another one, whose cancellation cancels it."""
        return await drive(whole(self._call(coroutine)))

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> PortalCall[_T]:
        """Start ``coroutine`` on the loop, from another one."""
        assert self._portal is not None
        with self._calling:
            if self._is_closed:
                coroutine.close()
                raise ServiceDrainingError("the service is closed")
            call = self._portal.submit(coroutine)
            self._calls.add(call.future)
            call.future.add_done_callback(self._calls.discard)
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
        """Seconds since the loop is known to have run. From any thread."""
        return time.monotonic() - self._last_beat
