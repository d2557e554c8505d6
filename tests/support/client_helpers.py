"""A service that answers as a test says, and both clients as one."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from asyncpipe.service.client import AsyncJobClient, JobClient

__all__ = ["Awaited", "Request", "Service", "breaks", "says", "scripted"]


class Awaited:
    """An ``AsyncJobClient`` whose calls block, so that both clients pass the same tests."""

    def __init__(self, url: str, token: str | None = None, *, sleep: Callable[[float], object], **options: Any) -> None:
        async def pause(seconds: float) -> None:
            sleep(seconds)

        self._client = AsyncJobClient(url, token, sleep=pause, **options)

    def __repr__(self) -> str:
        return repr(self._client)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            found = getattr(self._client, name)(*arguments, **options)
            return asyncio.run(found) if inspect.iscoroutine(found) else each(found)

        return call


def each(found: AsyncGenerator[Any, None]) -> Iterator[Any]:
    with asyncio.Runner() as runner:
        try:
            while True:
                yield runner.run(anext(found))
        except StopAsyncIteration:
            return
        finally:
            runner.run(found.aclose())


@dataclass
class Request:
    """What came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Service:
    """Answers with one of ``answers`` after the other, the last one again and again."""

    url: str
    kind: Callable[..., Any] = JobClient
    """Which client asks."""
    answers: list[Callable[[BaseHTTPRequestHandler], None]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def client(self, path: str = "", **options: Any) -> Any:
        return self.kind(self.url + path, **{"sleep": self.pauses.append, "timeout": 10.0, **options})

    def next(self, request: Request) -> Callable[[BaseHTTPRequestHandler], None]:
        with self.lock:
            self.requests.append(request)
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def scripted(kind: Callable[..., Any]) -> Iterator[Service]:
    """A service that answers as it is told, for a client of the ``kind``."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            content = self.rfile.read(length)
            headers = {name.lower(): value for name, value in self.headers.items()}
            answer = found.next(Request(self.command, self.path, headers, json.loads(content) if content else None))
            with suppress(OSError):
                answer(self)
            self.close_connection = True

        do_GET = do_POST = do_PUT = answer

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found = Service(f"http://127.0.0.1:{server.server_port}", kind)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


def says(
    status: int, body: Any = None, *, raw: bytes | None = None, **headers: str
) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        content = json.dumps(body).encode() if raw is None else raw
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def breaks(handler: BaseHTTPRequestHandler) -> None:
    """The connection ends before a word is said."""
    handler.connection.shutdown(socket.SHUT_RDWR)
