"""Whose turn it is: one caller at a time, threads and coroutines of any loop, in the order in which they ask.

A caller that blocks may ask while its own thread has the turn: a hook at the end of a step calls the pipeline there. To
wait would be to wait for oneself, so it has the turn as well.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future

from asyncpipe.runtime.portal import block_until_done
from asyncpipe.runtime.waits import Waiting

__all__ = ["Turn"]


class Turn:
    """A fair lock for both kinds of callers: ``yield from turn.acquired(...)``, then ``release``."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may close a caller's generator inside, and so release the turn.
        self._lock = threading.RLock()
        self._waiting: deque[_Asked] = deque()
        self._thread = 0
        """Who has it, if ``_depth`` is not 0."""
        self._depth = 0

    def acquired(self, *, nested: bool) -> Waiting[None]:
        """Wait for the turn. ``nested``: the caller blocks, so it has the turn at once if its own thread has it."""
        asked = self._ask(nested=nested)
        if asked is None:
            return
        try:
            yield asked
        except BaseException:
            if not asked.future.cancel():  # It was the caller's already.
                self.release()
            raise

    def release(self) -> None:
        """Give it to whoever has asked first."""
        with self._lock:
            self._depth -= 1
            self._grant()

    def _ask(self, *, nested: bool) -> _Asked | None:
        asked = _Asked()
        with self._lock:
            if nested and self._depth and self._thread == asked.thread:
                self._depth += 1
                return None
            self._waiting.append(asked)
            self._grant()
        return None if asked.future.done() else asked

    def _grant(self) -> None:
        while self._depth == 0 and self._waiting:
            asked = self._waiting.popleft()
            if asked.future.set_running_or_notify_cancel():
                self._thread, self._depth = asked.thread, 1
                asked.future.set_result(None)


class _Asked:
    """A caller that waits for the turn."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.future: Future[None] = Future()

    async def awaited(self) -> None:
        await asyncio.wrap_future(self.future)

    def wait(self) -> None:
        block_until_done(self.future)
