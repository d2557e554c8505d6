"""An HTTP server for ``/metrics``, in threads of its own: it answers also while an event loop is stuck.

::

    accepted ──▶ sends its head ──── HEAD_SECONDS ────▶ closed
        │             │
        │             ├─ host, token, method, path ────▶ 421, 401, 405, 404
        │             ▼
        │         is answered ────── READ_SECONDS ─────▶ closed
        └─ all connections are in use: the one that has waited longest for its head gives way;
           if all are being answered: 503

So connections that send nothing keep no scrape out, however many they are, and cost no thread for longer than that.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from http import HTTPStatus
from http.client import HTTPException, parse_headers
from io import BytesIO
from time import monotonic, sleep
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import make_wsgi_app

from asyncpipe.errors import OptionError
from asyncpipe.observe.http_hosts import host_name, is_loopback
from asyncpipe.observe.http_tokens import CHALLENGES, sent_token

__all__ = ["MetricsServer", "serve_metrics"]

HEAD_SECONDS = 5.0
"""How long a client may take for the head of its request."""
READ_SECONDS = 30.0
"""How long a client may take to read its answer, the time to make it included."""
MOST_HEAD = 16 * 1024
MOST_CONNECTIONS = 16
"""Scrapers are few; each connection is a thread."""
POLL_SECONDS = 0.25
"""How often deadlines are looked at."""
BACKLOG = 64

MayRead = Callable[[bytes], bool]


@dataclass(eq=False)
class _ScrapeConnection:
    """One connection."""

    socket: socket.socket
    deadline: float
    is_answered: bool = False
    """Whether its head has come."""

    def cut(self) -> None:
        """Wake its thread, which then ends."""
        with suppress(OSError):  # It has gone already.
            self.socket.shutdown(socket.SHUT_RDWR)


class _ScrapeServer(socketserver.ThreadingTCPServer):
    """Accepts connections, a thread for each, and keeps the deadlines of all."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = BACKLOG

    def __init__(
        self, address: tuple[str, int], registry: CollectorRegistry, may_read: MayRead | None, most: int
    ) -> None:
        family, *_, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        self.application = make_wsgi_app(registry)
        self.may_read = may_read
        self.is_local = is_loopback(address[0])
        self._most = most
        self._scrapes: dict[socket.socket, _ScrapeConnection] = {}
        """In the order of their coming."""
        self._lock = threading.Lock()
        super().__init__(place, _ScrapeHandler)  # type: ignore[arg-type]  # Addresses of IPv6 have four parts.

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Make room for a connection; false if there is none."""
        with self._lock:
            if len(self._scrapes) >= self._most:
                waiting = next((each for each in self._scrapes.values() if not each.is_answered), None)
                if waiting is None:
                    with suppress(OSError):
                        request.setblocking(False)
                        request.send(_answer(HTTPStatus.SERVICE_UNAVAILABLE, "all connections are in use; try again"))
                    return False
                del self._scrapes[waiting.socket]
                waiting.cut()
            self._scrapes[request] = _ScrapeConnection(request, monotonic() + HEAD_SECONDS)
        return True

    def answers(self, request: socket.socket) -> bool:
        """Note that the head of ``request`` has come; false if it has given way meanwhile."""
        with self._lock:
            scrape = self._scrapes.get(request)
            if scrape is not None:
                scrape.is_answered, scrape.deadline = True, monotonic() + READ_SECONDS
        return scrape is not None

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next connection."""
        try:
            return super().get_request()
        except OSError:
            # Out of descriptors, perhaps: the connection stays in the queue, and asking at once would ask for ever.
            sleep(POLL_SECONDS)
            raise

    def service_actions(self) -> None:
        """Cut the connections that are late."""
        now = monotonic()
        with self._lock:
            for scrape in self._scrapes.values():
                if scrape.deadline < now:
                    scrape.cut()

    def shutdown_request(self, request: Any) -> None:
        """The connection has ended."""
        with self._lock:
            self._scrapes.pop(request, None)
        super().shutdown_request(request)

    def close_all(self) -> None:
        """Cut every connection."""
        with self._lock:
            for scrape in self._scrapes.values():
                scrape.cut()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went before it had its answer is nothing to tell; the base class prints a traceback."""


class _ScrapeHandler(socketserver.BaseRequestHandler):
    """Answers one request; each connection has one."""

    server: _ScrapeServer

    def handle(self) -> None:
        """Read the head, check it and answer."""
        head = self._head()
        if head is None or not self.server.answers(self.request):
            return
        self.request.sendall(self._answered(head))

    def _head(self) -> bytes | None:
        """Everything up to the empty line; ``None`` if the client ends before it, is late, or sends too much."""
        head = b""
        while b"\r\n\r\n" not in head:
            piece = self.request.recv(MOST_HEAD)
            head += piece
            if not piece or len(head) > MOST_HEAD:
                return None
        return head

    def _answered(self, head: bytes) -> bytes:
        lines = BytesIO(head)
        try:
            method, target, version = lines.readline().decode("latin-1").split()
            headers = parse_headers(lines)
        except (ValueError, HTTPException):
            return _answer(HTTPStatus.BAD_REQUEST, "the request is not HTTP")
        if not version.startswith("HTTP/1."):
            return _answer(HTTPStatus.BAD_REQUEST, "the request is not HTTP/1")
        return self._refusal(method, target, headers) or self._scraped(target, headers)

    def _refusal(self, method: str, target: str, headers: Message) -> bytes | None:
        # Against DNS rebinding: a foreign page may make its name this machine's, and read what is here for everybody.
        if self.server.is_local and not is_loopback(host_name(headers.get("Host", ""))):
            return _answer(HTTPStatus.MISDIRECTED_REQUEST, "this server does not have that name; use its address")
        if self.server.may_read is not None:
            token = sent_token(headers.get_all("Authorization", []))
            if token is None or not self.server.may_read(token):
                detail = "send a token: 'Authorization: Bearer TOKEN'"
                return _answer(HTTPStatus.UNAUTHORIZED, detail, dict([CHALLENGES[0]]))
        if method != "GET":
            return _answer(HTTPStatus.METHOD_NOT_ALLOWED, "allowed here: GET", {"Allow": "GET"})
        if target.partition("?")[0] != "/metrics":
            return _answer(HTTPStatus.NOT_FOUND, "the metrics are at /metrics")
        return None

    def _scraped(self, target: str, headers: Message) -> bytes:
        environment = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": "/metrics",
            "QUERY_STRING": target.partition("?")[2],
            "HTTP_ACCEPT": headers.get("Accept"),
            "HTTP_ACCEPT_ENCODING": headers.get("Accept-Encoding"),
        }
        found = _ScrapeHead()
        body = b"".join(self.server.application(environment, found.start))
        return _whole(found.status, found.headers, body)


@dataclass
class _ScrapeHead:
    """What the WSGI application says before the body."""

    status: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def start(self, status: str, headers: list[tuple[str, str]], *_: object) -> Callable[[bytes], object]:
        """``start_response`` of WSGI."""
        self.status, self.headers = status, dict(headers)
        return lambda _: None


def _answer(status: HTTPStatus, detail: str, headers: Mapping[str, str] | None = None) -> bytes:
    kind = {"Content-Type": "text/plain; charset=utf-8"}
    return _whole(f"{status.value} {status.phrase}", kind | dict(headers or {}), f"{detail}\n".encode())


def _whole(status: str, headers: Mapping[str, str], body: bytes) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers.items())]
    lines += [f"Content-Length: {len(body)}", "Connection: close", "X-Content-Type-Options: nosniff"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class MetricsServer:
    """A running HTTP server for ``/metrics``; leaving its ``with`` block closes it."""

    def __init__(
        self,
        registry: CollectorRegistry,
        port: int,
        address: str,
        may_read: MayRead | None = None,
        most_connections: int = MOST_CONNECTIONS,
    ) -> None:
        try:
            self._server = _ScrapeServer((address, port), registry, may_read, most_connections)
        except OSError as error:
            raise OptionError(f"cannot serve metrics on {address}:{port}: {error}") from error
        self.port: int = self._server.server_address[1]
        # Ends by ``shutdown``, or with the process.
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(POLL_SECONDS,), name="asyncpipe metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving, free the port and join the thread; may be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._server.close_all()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_metrics(
    registry: CollectorRegistry,
    port: int,
    address: str = "127.0.0.1",
    *,
    may_read: Callable[[bytes], bool] | None = None,
    most_connections: int = MOST_CONNECTIONS,
) -> MetricsServer:
    """A server that answers scrapes of ``registry`` on threads of its own; port 0 takes a free one (``.port``).

    By default it listens on loopback alone, and there answers only requests to a name of this machine. With
    ``may_read``, requests need a token for which that returns true; it is called on the threads that answer. At most
    ``most_connections`` are open at once, each for some seconds. Raises ``OptionError`` if it cannot listen there.
    Close it, or use it in a ``with``: nothing else ends its threads.
    """
    return MetricsServer(registry, port, address, may_read, most_connections)
