"""Server-sent events over ASGI: an answer that has no end of its own, and the open ones of an application.

::

    an event ──▶ send ──▶ the server's buffer ──▶ the client
                  └─ returns when the client has taken what came before; only then is the next event asked for

There is no queue, so a client that does not read costs one event; one that reads nothing for ``UNREAD_SECONDS`` is not
sent any more. A stream ends at once when its client has gone.

A server waits for open answers before it tells an application to end, so streams have to know it from elsewhere.
``served`` (``http_server.py``) ends the application first. uvicorn under a program of somebody else tells nothing, but
its signal handler belongs to a server that says ``should_exit``: this is looked at while streams are open.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["UNREAD_SECONDS", "EventStream", "EventStreams", "until_gone"]

RETRY = b"retry: 1000\n\n"
"""The milliseconds after which a page reconnects when its connection is lost."""
GOODBYE_SECONDS = 1.0
"""The time that clients have to take the last events."""
UNREAD_SECONDS = 30.0
"""A client that takes nothing for so long has gone, or holds the connection on purpose."""
LOOK_SECONDS = 0.25
"""Between two looks at whether the host's server ends."""


class EventStreams:
    """The open event streams of an application. ``end`` makes all of them come to their ends."""

    def __init__(self, end: Callable[[], Awaitable[None]]) -> None:
        self._end = end
        self._open = 0
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._watch: asyncio.Task[None] | None = None

    def opened(self) -> None:
        """A stream begins."""
        self._open += 1
        self._none_open.clear()
        server = _host_server()
        if server is not None and self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._watch_host(server), name="asyncpipe-streams")

    def closed(self) -> None:
        """A stream has ended."""
        self._open -= 1
        if not self._open:
            self._none_open.set()

    async def close(self) -> None:
        """End all streams, and wait until clients have taken the last events, or have not in ``GOODBYE_SECONDS``."""
        await self._end()
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self._none_open.wait()
        if self._watch is not None:
            self._watch.cancel()

    async def _watch_host(self, server: Any) -> None:
        try:
            while self._open:
                if server.should_exit:
                    await self._end()
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._none_open.wait()
        finally:
            self._watch = None


class EventStream(Response):
    """Answers with ``events`` until they end or the client has gone; ``held`` is entered meanwhile, and may refuse."""

    media_type = "text/event-stream"

    def __init__(
        self,
        streams: EventStreams,
        events: AsyncGenerator[bytes, None],
        held: AbstractContextManager[None] | None = None,
    ) -> None:
        # Without the header, proxies such as nginx hold events back until they have some kilobytes.
        super().__init__(headers={"X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self.headers["Content-Type"] = "text/event-stream"  # No charset: the format has one only.
        self._streams = streams
        self._events = events
        self._held = held or nullcontext()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        begin = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        if scope["method"] == "HEAD":
            await send(begin)
            await send({"type": "http.response.body", "body": b""})
            return
        with self._held:
            self._streams.opened()
            try:
                await send(begin)
                await until_gone(receive, self._send(send))
            finally:
                self._streams.closed()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": RETRY, "more_body": True})
        async with aclosing(self._events) as events:
            async for event in events:
                async with asyncio.timeout(UNREAD_SECONDS):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def until_gone(receive: Receive, sending: Any) -> None:
    """Run ``sending`` until it ends, or until the client has gone."""
    sends, gone = asyncio.ensure_future(sending), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((sends, gone), return_when=asyncio.FIRST_COMPLETED)
        if sends.done():
            with suppress(TimeoutError, OSError):  # The client takes nothing, or has gone.
                sends.result()
    finally:
        for each in (sends, gone):
            each.cancel()
        await asyncio.wait((sends, gone))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _host_server() -> Any | None:
    """The server that handles the signals of this process, if it is one that says ``should_exit``."""
    owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return owner if hasattr(owner, "should_exit") else None
