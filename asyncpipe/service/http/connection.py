"""Limits of a connection: before a request is understood, and while its answer is not read.

::

    connected ──▶ waits for a head ──── header_seconds ────▶ closed       (aiohttp's keep-alive timer)
        │             │      ▲
        │             ▼      │
        │         is answered ──── the client reads nothing for UNREAD_SECONDS ────▶ aborted
        └─ too many connections: 503, closed

These belong to the server, not to the application: a host that mounts the API has its own.
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

UNREAD_SECONDS = 30.0
"""A client that reads nothing of its answer for so long has gone, or holds the connection on purpose."""
LINGER_SECONDS = 2.0
"""How long a client whose body was refused may go on sending it and read the answer."""
MOST_HEAD = 8190
"""The most bytes of a request line, and of a header."""

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
        """Serve the connection, or refuse it if there are too many."""
        transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit asyncio.Transport.
        if len(self._held) >= self._most:
            transport.write(_refusal(self._redact))
            transport.close()
            return
        self._held.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """The connection has ended."""
        self._held.discard(self)
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process bytes of a request; drop those of a refused connection."""
        if self in self._held:
            super().data_received(data)

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        super().pause_writing()
        if self.transport is not None:
            self._cut = asyncio.get_running_loop().call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        self._stop_waiting()
        super().resume_writing()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to malformed HTTP; unlike aiohttp's, it does not quote the request and is not logged."""
        if status >= 500:
            # A client that has gone is not an error of the service.
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
    """A factory of connections for ``server``: at most ``most``; each waits ``header_seconds`` for a request's head."""
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
    """The bytes of a whole response, since there is no request yet that aiohttp could answer."""
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
