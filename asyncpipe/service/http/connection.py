"""Limits of a connection: before a request is understood, and while its answer is not read.

::

    connected ──▶ waits for a head ──── header_seconds ────▶ closed
        │             │      ▲
        │             ▼      │
        │         is answered ──── the client reads nothing for UNREAD_SECONDS ────▶ aborted
        └─ too many connections: one that asks nothing gives way (places.py); if all are being answered,
           this one is answered if it is a probe's, and otherwise 503 and closed

A subclass of uvicorn's protocol, since uvicorn has none of these guards. Its ``limit_concurrency`` counts a connection
when it has sent a whole head, so that those that send none are without a limit; a head may come as slowly and be as
long as a client likes; a client that does not read is waited for. Its answer to malformed HTTP is text, and a line in
the log for each, which a client could fill the disk with. uvicorn's own are kept: the keep-alive timer, which here is
also that of the head, and the flow control of bodies and answers.

These belong to the server, not to the application: a host that mounts the API has its own.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from asyncpipe.observe.http_server import Connect
from asyncpipe.service.http.places import Places
from asyncpipe.service.http.problems import LINGER_SECONDS, Problem
from asyncpipe.service.http.redact import Redactor
from asyncpipe.service.http.who import ADMITTED

__all__ = ["ClientConnection", "connections"]

UNREAD_SECONDS = 30.0
"""A client that reads nothing of its answer for so long has gone, or holds the connection on purpose."""
MOST_LINE = 8190
"""The most bytes of a request line, and of a header."""
MOST_HEADERS = 100
MOST_HEAD = 64 * 2**10
"""The most bytes of a head that has not come whole."""

MOST_PROBE = 64
"""The most bytes in which a probe says what it asks."""
PROBE_SECONDS = 2.0
"""How long a connection without a place has to ask for a probe, and to be answered."""
MALFORMED = Problem(400, "malformed", "the request is not HTTP", close=True)
TOO_LARGE = Problem(
    431,
    "head-too-large",
    f"a request line and a header may have {MOST_LINE} bytes each, and there may be {MOST_HEADERS} headers",
    close=True,
)
TOO_MANY = Problem(
    503, "too-many-connections", "all connections are in use; try again", headers=[("Retry-After", "1")], close=True
)

_PATH = re.compile(rb"(?:GET|HEAD) (/[!->@-~]*)[ ?]")  # Up to a question mark.


class ClientConnection(HttpToolsProtocol):
    """One client's connection."""

    def __init__(
        self,
        config: Config,
        state: ServerState,
        places: Places,
        probes: Collection[str],
        header_seconds: float,
        redact: Redactor,
    ) -> None:
        super().__init__(config, state, {})
        self._places = places
        self._probes = probes
        self._header_seconds = header_seconds
        self._redact = redact
        self._first: bytes | None = None
        """The first bytes of a connection that has no place but a probe's, until it is known what it asks."""
        self._is_probe = False
        self._reads_head = True
        self._head = 0
        """Bytes so far of the head that is being read."""
        self._wrong: Problem | None = None
        """What the head that is being read is refused with."""
        self._refused = False
        """Whether nothing is read any more."""
        self._timer: asyncio.TimerHandle | None = None
        """Cuts a client that reads nothing, or a probe that takes too long."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Serve the connection if there is a place for it, or wait for what it asks."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit asyncio.Transport.
        if self._places.came(self):
            self._serve()
        else:
            self._first = b""
            self.connections.add(self)
            self._timer = self.loop.call_later(PROBE_SECONDS, self.turn_away)

    def _serve(self) -> None:
        super().connection_made(self.transport)
        self.timeout_keep_alive = cast(int, self._header_seconds)  # Parts of a second will do
        self.timeout_keep_alive_task = self.loop.call_later(self._header_seconds, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._places.left(self)
        self._unset_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process bytes of a request; drop those of a refused connection.

        The timer of the head goes on, unlike in uvicorn's: a head that comes drop by drop is slow as well.
        """
        if self._refused:
            return
        if self._first is not None:
            self._look(self._first + data)
            return
        if self._reads_head:
            self._head += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # An offer, which is declined by answering the request. What follows cannot be read any more.
            self._refused = True
            self.cycle.keep_alive = False
        except httptools.HttpParserError:
            self._refuse(self._wrong or MALFORMED)
        else:
            if self._head > MOST_HEAD:
                self._refuse(TOO_LARGE)

    # Where all places are taken

    def _look(self, first: bytes) -> None:
        """Serve a probe, whose request begins with ``first``; turn away what is none; or wait for more of it."""
        found = _PATH.match(first)
        if found is not None and found[1].decode() in self._probes:
            self._first, self._is_probe = None, True
            self._serve()
            self.data_received(first)
        elif found is not None or len(first) >= MOST_PROBE or b"\n" in first:
            self.turn_away()
        else:
            self._first = first

    def turn_away(self) -> None:
        """Say that there are too many connections, and end; a probe that is being answered ends as well."""
        if self._refused or self._is_probe:
            self.transport.abort()
            return
        self._refused = True
        self.transport.write(_whole(TOO_MANY, self._redact))
        self.transport.close()

    def give_way(self) -> None:
        """End, since another client needs the place, and this one asks nothing."""
        self._refused = True
        self.transport.close()

    # Called by the parser; what they raise ends it

    def on_url(self, url: bytes) -> None:
        """A part of the request's address."""
        super().on_url(url)
        self._check(len(self.url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        super().on_header(name, value)
        self._check(len(name) + len(value))

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._reads_head, self._head = False, 0
        self._unset_keepalive_if_required()
        # Access control says when a request may be answered: who may not ask keeps no place, whatever is asked.
        scope = cast(dict[str, Any], self.scope)
        scope[ADMITTED] = partial(self._places.asks, self)
        super().on_headers_complete()
        if self._is_probe and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        """A request has been answered."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._places.rests(self)

    def on_message_complete(self) -> None:
        """The body is there; what follows is another head."""
        self._reads_head = True
        super().on_message_complete()

    def _check(self, size: int) -> None:
        if size > MOST_LINE or len(self.headers) > MOST_HEADERS:
            self._wrong = TOO_LARGE
            raise ValueError("the head is too large")

    def _refuse(self, problem: Problem) -> None:
        """Answer what is no request, and close the connection; what still comes is read and dropped for a while.

        Where an earlier request is being answered, its answer is the last one.
        """
        self._refused = True
        self._unset_keepalive_if_required()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if self.pipeline or (cycle.more_body and cycle.response_started):
                self.transport.abort()
                return
            cycle.keep_alive = False
            if not cycle.more_body:
                return
            cycle.disconnected = True  # Its body is what is malformed: whoever reads it is told that nobody waits.
            cycle.message_event.set()
        self.transport.write(_whole(problem, self._redact))
        self.transport.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    # While an answer is sent

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        super().pause_writing()
        if self._timer is None:
            self._timer = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        if not self._refused:
            self._unset_timer()
        super().resume_writing()

    def _unset_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def connections(most: int, probes: Collection[str], header_seconds: float, redact: Redactor) -> Connect:
    """A factory of connections: at most ``most``; each waits ``header_seconds`` for a request's head.

    Requests of the paths ``probes`` are answered beyond that number.
    """
    places = Places(most)
    return lambda config, state: ClientConnection(config, state, places, probes, header_seconds, redact)


def _whole(problem: Problem, redact: Redactor) -> bytes:
    """The bytes of a whole response, since there is no request yet that the application could answer."""
    answer = problem.answer(redact)
    phrase = HTTPStatus(problem.status).phrase
    head = [f"HTTP/1.1 {problem.status} {phrase}".encode(), *(b": ".join(each) for each in answer.raw_headers)]
    return b"\r\n".join([*head, b"", bytes(answer.body)])
