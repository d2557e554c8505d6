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

from asyncpipe.observe.live.event_streams import EventStream, EventStreams
from asyncpipe.service.http.models import EventAnswer
from asyncpipe.service.http.rate_limits import StreamLimit
from asyncpipe.service.http.redact import Redactor
from asyncpipe.service.store.job_records import JobEvent

__all__ = ["EVENT", "JobEventStreams"]

KEEP_ALIVE_SECONDS = 15.0
"""Less than the minute or so after which proxies close idle connections."""
KEEP_ALIVE = b": nothing new\n\n"
END = b"event: end\ndata: {}\n\n"
EVENT = {
    "description": "An event of the stream; the event end is the last.",
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[0-9]+$"},
        "event": {"enum": ["state", "note", "snapshot", "step", "end"]},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {
                "anyOf": [
                    {"$ref": f"#/components/schemas/{EventAnswer.__name__}"},
                    {"type": "object", "maxProperties": 0, "description": "Of the end"},
                ]
            },
        },
    },
    "required": ["event", "data"],
}
"""The schema of one event."""


class JobEventStreams:
    """Makes the event streams of jobs, at most as many as ``limit`` allows, all of which ``end`` ends."""

    def __init__(self, streams: EventStreams, limit: StreamLimit, redact: Redactor) -> None:
        self._streams = streams
        self._limit = limit
        self._redact = redact
        self._closing = asyncio.Event()

    def answer(self, events: AsyncGenerator[JobEvent, None], is_over: Callable[[], Awaitable[bool]]) -> EventStream:
        """The answer that sends ``events``; after the last one, ``is_over`` says whether the job has ended.

        Raises ``Problem``, when it is sent, if there are too many streams.
        """
        return EventStream(self._streams, self._parts(events, is_over), self._limit.hold())

    def end(self) -> None:
        """End every stream; those that begin later end at once."""
        self._closing.set()

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


async def _next(events: AsyncGenerator[JobEvent, None]) -> JobEvent | None:
    return await anext(events, None)
