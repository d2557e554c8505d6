"""Server-sent events: the events of a job as they happen, until the job has ended or the server closes.

::

    service.follow(job, after) ──▶ event ──▶ "id: 7", "event: state", "data: {…}" ──▶ the client reads it ──▶ the next

There is no queue: the next event is fetched when the client has taken the last one. A client that reconnects sends the
last id that it received and continues after it. The last event of a job that has ended is ``end``; a stream without it
was cut off, or the service shuts down. Comments keep the connection open meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress

from aiohttp import web

from asyncpipe.observe.live.handlers import EventStreams
from asyncpipe.service.http.models import EventAnswer
from asyncpipe.service.http.rate_limits import StreamLimit
from asyncpipe.service.http.redact import Redactor
from asyncpipe.service.jobs.job_log import JobEvent

__all__ = ["JobEventStreams"]

KEEP_ALIVE_SECONDS = 15.0
"""Less than the minute or so after which proxies close idle connections."""
KEEP_ALIVE = b": nothing new\n\n"
END = b"event: end\ndata: {}\n\n"


class JobEventStreams:
    """The event streams of an API, at most as many as ``limit`` allows; ``close`` ends them."""

    def __init__(self, limit: StreamLimit, redact: Redactor) -> None:
        self._limit = limit
        self._redact = redact
        self._closing = asyncio.Event()
        self._streams = EventStreams()

    async def send(
        self, request: web.Request, events: AsyncGenerator[JobEvent, None], is_over: Callable[[], Awaitable[bool]]
    ) -> web.StreamResponse:
        """Answer ``request`` with ``events``; after the last one, ``is_over`` says whether the job has ended.

        Raises ``Problem`` if there are too many streams.
        """
        with self._limit.hold():
            return await self._streams.send(request, self._parts(events, is_over))

    async def _parts(
        self, events: AsyncGenerator[JobEvent, None], is_over: Callable[[], Awaitable[bool]]
    ) -> AsyncGenerator[bytes, None]:
        closing = asyncio.ensure_future(self._closing.wait())
        coming: asyncio.Future[JobEvent | None] | None = None
        try:
            while not closing.done():
                if coming is None:
                    coming = asyncio.ensure_future(_next(events))
                await asyncio.wait((closing, coming), timeout=KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if coming.done():
                    event, coming = coming.result(), None
                    if event is None:
                        if await is_over():
                            yield END
                        return
                    yield self._bytes(event)
                elif not closing.done():
                    yield KEEP_ALIVE
        finally:
            for waiting in (closing, coming):
                if waiting is not None:
                    waiting.cancel()
                    with suppress(asyncio.CancelledError, Exception):
                        await waiting
            await events.aclose()

    def _bytes(self, event: JobEvent) -> bytes:
        data = EventAnswer.of(event, self._redact).model_dump_json()
        return f"id: {event.id}\nevent: {event.kind}\ndata: {data}\n\n".encode()

    async def close(self, _: web.Application) -> None:
        """End every stream, and cut the connections of clients that do not read."""
        self._closing.set()
        await self._streams.close()


async def _next(events: AsyncGenerator[JobEvent, None]) -> JobEvent | None:
    return await anext(events, None)
