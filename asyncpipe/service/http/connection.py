"""What a connection may cost before a request is understood, and while its answer is not taken.

::

    connected ──▶ waits for a head ──── header_seconds ────▶ closed       (aiohttp's keep-alive timer runs from here)
        │             │      ▲
        │             ▼      │
        │         is answered ──── the client takes nothing for UNTAKEN_SECONDS ────▶ cut
        └─ one too many: 503, closed

These are a server's matters, so they are here and not in the application: a host that mounts the API has its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from asyncpipe.service.http.problems import Problem
from asyncpipe.service.http.redact import Redactor

__all__ = ["ClientConnection", "connections"]

UNTAKEN_SECONDS = 30.0
"""A client that takes nothing of its answer for so long is gone, or holds the connection on purpose."""
LINGER_SECONDS = 2.0
"""For a client to stop sending the body that it was refused for, and to read why."""
MOST_HEAD = 8190
"""Bytes of a request line, and of a header."""

_logger = logging.getLogger("asyncpipe.service.http")


class ClientConnection(web.RequestHandler):
    """One client's connection."""

    def __init__(
        self, server: web.Server, held: set[ClientConnection], most: int, redact: Redactor, **options: Any
    ) -> None:
        super().__init__(server, **options)
        self._held = held
        self._most = most
        self._redact = redact
        self._cut: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve, or refuse to."""
        transport = cast(asyncio.Transport, transport)  # uvloop's is one, and does not inherit it.
        if len(self._held) >= self._most:
            transport.write(_refusal(self._redact))
            transport.close()
            return
        self._held.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client has gone, or was cut off."""
        self._held.discard(self)
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request; those of a client that was refused are nobody's."""
        if self in self._held:
            super().data_received(data)

    def pause_writing(self) -> None:
        """The client does not take what was sent."""
        super().pause_writing()
        if self.transport is not None:
            self._cut = asyncio.get_running_loop().call_later(UNTAKEN_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """It has begun to."""
        self._stop_waiting()
        super().resume_writing()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is no HTTP; without what it was, which aiohttp would quote, and log with a traceback."""
        if status >= 500:
            # A client that has gone is no trouble of ours.
            level = logging.DEBUG if isinstance(exc, ConnectionError) else logging.ERROR
            _logger.log(level, "a request could not be answered", exc_info=exc)
            return Problem(500, "internal", "something went wrong", close=True).answer(self._redact)
        if isinstance(exc, LineTooLong):
            detail = f"a request line and a header may have {MOST_HEAD} bytes each"
            return Problem(431, "head-too-large", detail, close=True).answer(self._redact)
        return Problem(400, "malformed", "the request is not HTTP", close=True).answer(self._redact)

    def _stop_waiting(self) -> None:
        if self._cut is not None:
            self._cut.cancel()
            self._cut = None


def connections(
    server: web.Server, most: int, header_seconds: float, redact: Redactor
) -> Callable[[], asyncio.Protocol]:
    """Makes the connections of ``server``: at most ``most``, each waiting ``header_seconds`` for a request's head."""
    held: set[ClientConnection] = set()
    loop = asyncio.get_running_loop()

    def make() -> ClientConnection:
        return ClientConnection(
            server,
            held,
            most,
            redact,
            loop=loop,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=header_seconds,
            lingering_time=LINGER_SECONDS,
            max_field_size=MOST_HEAD,
            max_line_size=MOST_HEAD,
        )

    return make


def _refusal(redact: Redactor) -> bytes:
    """A whole answer: there is no request yet that aiohttp could answer."""
    problem = Problem(503, "too-many-connections", "all connections are in use; try again")
    body = json.dumps(problem.document(redact)).encode()
    lines = [
        "HTTP/1.1 503 Service Unavailable",
        "Content-Type: application/problem+json",
        f"Content-Length: {len(body)}",
        "Retry-After: 1",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
