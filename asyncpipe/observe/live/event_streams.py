"""Server-sent events over aiohttp: sending a stream of events, and ending all streams when the server closes.

A file apart from ``feed.py``, because it needs aiohttp to be imported.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from aiohttp import web

__all__ = ["EventStreams"]

RETRY = b"retry: 1000\n\n"
"""The milliseconds after which a page reconnects when its connection is lost."""
GOODBYE_SECONDS = 1.0
"""The time that clients have to take the last events before their connections are cut."""


class EventStreams:
    """The open event streams of an application."""

    def __init__(self) -> None:
        self._open: set[asyncio.Transport] = set()
        self._left = asyncio.Event()
        """Set when a stream has ended."""

    async def send(self, request: web.Request, events: AsyncGenerator[bytes, None]) -> web.StreamResponse:
        """Answer ``request`` with ``events``, until they end or the client has gone."""
        # Without the second header, proxies such as nginx hold events back until they have some kilobytes.
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        connection = request.transport
        if request.method == "HEAD" or connection is None:
            return response
        self._open.add(connection)
        try:
            await response.prepare(request)
            await response.write(RETRY)
            async with aclosing(events):
                async for event in events:
                    await response.write(event)
            await response.write_eof()
        except ConnectionError:
            pass  # The client has gone.
        finally:
            self._open.discard(connection)
            self._left.set()
        return response

    async def close(self) -> None:
        """Wait until all clients have taken the last events of their streams, which have ended by now; cut the rest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                while self._open:
                    self._left.clear()
                    await self._left.wait()
        for connection in list(self._open):
            # The handler waits until its client reads, which the client does not do; this ends the wait.
            connection.abort()
