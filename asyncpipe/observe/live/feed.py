"""What is sent to the pages of a live view: its newest snapshot, as one message for all pages.

However many pages are open, one thread takes a snapshot of the view at most four times a second, and only if there is
something new. Each page asks for the newest message four times a second, as soon as it has taken the one before::

    LiveView ──snapshot, in a thread──▶ LiveFeed: the newest message ◀── follow() ──▶ a page
                                                                     ◀── follow() ──▶ a slow page: skips messages
                                                                     ◀── newest() ──▶ /state

There is no queue, so a page that stops reading costs nothing. Closing the feed sends every page a last message, after
which its connection ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_hex
from time import monotonic, thread_time
from typing import Any

from asyncpipe.observe.live.view import LiveView

__all__ = ["LiveFeed", "Message"]

WATCHED_SECONDS, UNWATCHED_SECONDS = 0.25, 5.0
"""Least time between two snapshots while a page is open, and while none is. The latter keep the history of bubbles
complete for pages that open later. Four times a second is also how often a page asks for news."""
REST = 50.0
"""A snapshot that computed for a second is followed by this many seconds without one, so that the snapshots of huge
graphs do not slow down the training."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Message:
    """One snapshot of a view, ready to send."""

    id: str
    """Unique among the messages of all servers."""
    data: bytes
    """JSON on one line."""
    last: bool
    """Whether no message will follow."""

    @property
    def event(self) -> bytes:
        """As a server-sent event: ``state``, or ``end`` for the last one."""
        kind = b"end" if self.last else b"state"
        return b"id: %s\nevent: %s\ndata: %s\n\n" % (self.id.encode(), kind, self.data)


class LiveFeed:
    """The newest message of a view, for any number of followers. Belongs to one loop: ``start``, then ``close``."""

    def __init__(self, view: LiveView) -> None:
        self._view = view
        self._name = token_hex(4)
        self._count = 0
        self._version: tuple[int, ...] | None = None
        self._message: Message | None = None
        self._followers = 0
        self._closing = asyncio.Event()
        self._rested = 0.0
        """When the next snapshot may begin, by the monotonic clock."""
        self._logged = False
        self._turn = asyncio.Lock()
        """Held while a snapshot is taken."""
        self._thread = ThreadPoolExecutor(1, "asyncpipe-live")
        self._updates: asyncio.Task[None] | None = None

    @property
    def followers(self) -> int:
        """The number of pages that follow now."""
        return self._followers

    def start(self) -> None:
        """Begin to look for news; may be called again."""
        if self._updates is None and not self._closing.is_set():
            self._updates = asyncio.get_running_loop().create_task(self._update(), name="asyncpipe-live")

    async def close(self) -> None:
        """Send the last message to all followers and end the coroutine and the thread; may be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._updates is not None:
            await self._updates
        await self.newest()
        self._thread.shutdown(wait=False)

    async def newest(self) -> Message:
        """The newest message; takes a snapshot if the view has news and the last one was long enough ago."""
        async with self._turn:
            message, version = self._message, self._view.version
            if message is None:
                return await self._make_message(version)
            is_stale = version != self._version and monotonic() >= self._rested
            if not message.last and (is_stale or self._closing.is_set()):
                return await self._make_message(version)
            return message

    async def follow(self, seen: str | None = None) -> AsyncGenerator[bytes, None]:
        """The events for one page: the newest message unless its id is ``seen``, then each newest one.

        A page that is slow to ask for the next event skips messages. Ends after the last message.
        """
        self._followers += 1
        try:
            while not (message := await self.newest()).last:
                if message.id != seen:
                    seen = message.id
                    yield message.event
                await self._pause(WATCHED_SECONDS)
            yield message.event
        finally:
            self._followers -= 1

    async def _update(self) -> None:
        """Take snapshots also while nobody follows, for the history of bubbles."""
        while not self._closing.is_set():
            await self.newest()
            await self._pause(UNWATCHED_SECONDS)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    async def _make_message(self, version: tuple[int, ...]) -> Message:
        """The message of ``version`` of the view; if the snapshot fails, which is a bug, the last data again."""
        began = monotonic()
        ending = self._closing.is_set()
        try:
            data, last, took = await asyncio.get_running_loop().run_in_executor(self._thread, self._encoded, ending)
        except Exception:
            if not self._logged:
                _logger.exception("no snapshot of the live view could be taken; pages keep what they show")
            self._logged = True
            data, last, took = self._message.data if self._message else _json(LiveView().snapshot()), ending, 0.0
        self._count += 1
        self._version = version
        self._rested = began + max(WATCHED_SECONDS, took * REST)
        self._message = Message(f"{self._name}-{self._count}", data, last)
        return self._message

    def _encoded(self, ending: bool) -> tuple[bytes, bool, float]:
        """The snapshot as JSON, whether it is the last one, and the seconds that this thread computed."""
        began = thread_time()
        state = self._view.snapshot()
        state["ended"] = state["ended"] or ending
        data = _json(state)
        return data, state["ended"], thread_time() - began


def _json(state: dict[str, Any]) -> bytes:
    return json.dumps(state, allow_nan=False, separators=(",", ":")).encode()
