"""Server-sent events over ASGI: an answer that goes on until its events end, its client goes, or it is ended.

::

    an event ──▶ send ──▶ the server's buffer ──▶ the client
                  └─ returns when the client has taken what came before; only then is the next event asked for

There is no queue, so a client that does not read costs one event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

__all__ = ["EventStream", "until"]

KEEP_ALIVE = b": nothing new\n\n"
KEEP_ALIVE_SECONDS = 15.0
"""Less than the minute or so after which proxies close idle connections."""
LOOK_SECONDS = 1.0
"""Between two looks at whether a stream may go on."""
RETRY = b"retry: 1000\n\n"
"""The milliseconds after which a page reconnects when its connection is lost."""


class EventStream(StreamingResponse):
    """Answers with ``events`` until they end or the client has gone, within ``place``; they are closed then."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], place: AbstractContextManager[object] | None = None
    ) -> None:
        # Without the header, proxies such as nginx hold events back until they have some kilobytes.
        super().__init__(_with_retry(events), headers={"X-Accel-Buffering": "no"})
        self.headers["Content-Type"] = "text/event-stream"  # No charset: the format has one only.
        self._events = events
        self._place = place or nullcontext()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        async with aclosing(self._events):
            with self._place:
                await super().__call__(scope, receive, send)


async def _with_retry(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield RETRY
    async for event in events:
        yield event


async def until(
    over: asyncio.Event, may_go_on: Callable[[], bool], events: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    """``events`` until they end, ``over`` is set, or ``may_go_on``, which is asked each second, is false.

    Comments keep a quiet connection open.
    """
    closing = asyncio.ensure_future(over.wait())
    coming: asyncio.Task[bytes | None] | None = None
    quiet = 0.0
    try:
        while may_go_on() and not closing.done():
            coming = coming or asyncio.create_task(_next(events))
            await asyncio.wait((closing, coming), timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                event, coming, quiet = coming.result(), None, 0.0
                if event is None:
                    return
                yield event
            elif (quiet := quiet + LOOK_SECONDS) >= KEEP_ALIVE_SECONDS:
                quiet = 0.0
                yield KEEP_ALIVE
    finally:
        waiting = [each for each in (closing, coming) if each is not None]
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
        await events.aclose()


async def _next(events: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(events, None)
