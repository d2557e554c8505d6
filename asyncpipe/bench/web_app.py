"""The web application of the ``embedded`` benchmark, and the requests to it, which another process sends.

``python -m asyncpipe.bench.web_app`` serves the application without training. Served by another process, requests cost
training only the CPU time that they take. The benchmark compares both.
"""

from __future__ import annotations

import asyncio
import gc
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractAsyncContextManager, contextmanager
from http.client import HTTPConnection, HTTPException
from multiprocessing import get_context
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from asyncpipe.observe.http_server import served
from asyncpipe.runtime.portal import new_event_loop

__all__ = ["make_app", "send_requests", "sender", "served_by_process", "served_here"]

MOST_CONNECTIONS = 64
PATIENCE = 10.0
"""Seconds to wait for unanswered requests at the end of a turn."""


def make_app() -> Starlette:
    """An application with a trivial handler at ``/``."""

    async def trivial(_: Request) -> Response:
        return PlainTextResponse("hello")

    app = Starlette()
    app.add_route("/", trivial)
    return app


def served_here(app: Starlette) -> AbstractAsyncContextManager[int]:
    """Serve ``app`` on the running loop during the block; yields the port on 127.0.0.1."""
    return served(app, "127.0.0.1", 0, "the benchmark")


@contextmanager
def served_by_process() -> Iterator[int]:
    """Serve ``make_app()`` in another process during the block; yields the port on 127.0.0.1."""
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


def sender() -> ProcessPoolExecutor:
    """A process for ``send_requests``, without garbage collection, which would delay requests."""
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=gc.disable)


class _Connection(HTTPConnection):
    """A connection that ``select`` takes."""

    due = 0.0
    """When its request was due."""

    def fileno(self) -> int:
        return self.sock.fileno()


def send_requests(port: int, rate: float, seconds: float) -> dict[str, Any]:
    """Send ``rate`` requests per second to ``port`` of 127.0.0.1 for ``seconds``, on this thread.

    Returns ``latencies`` and ``late`` in seconds, and ``failed``. Requests are due at a fixed rate, whether or not
    earlier ones have been answered, and latency counts from the due time: a server that stalls for a second causes 200
    slow requests, not one. ``late`` is the time between the due time of each request and its sending.
    """
    latencies, late, failed = [], [], 0
    idle: list[_Connection] = []
    busy: list[_Connection] = []
    first = time.perf_counter() + 0.01
    due = deque(first + number / rate for number in range(int(rate * seconds)))
    over = first + seconds + PATIENCE
    while (due or busy) and (now := time.perf_counter()) < over:
        while due and due[0] <= now and (idle or len(busy) < MOST_CONNECTIONS):
            connection = idle.pop() if idle else _Connection("127.0.0.1", port, timeout=PATIENCE)
            connection.due = due.popleft()
            connection.request("GET", "/")
            late.append(time.perf_counter() - connection.due)
            busy.append(connection)
        wait = max(0.0, due[0] - time.perf_counter()) if due else over - now
        if due and not wait:  # No connection is free: try again soon.
            wait = 0.001
        for connection in select.select(busy, (), (), wait)[0]:
            busy.remove(connection)
            try:
                answer = connection.getresponse()
                answer.read()
            except (OSError, HTTPException):
                answer = None
            if answer is not None and answer.status == 200:
                latencies.append(time.perf_counter() - connection.due)
                idle.append(connection)
            else:
                failed += 1
                connection.close()
    for connection in (*idle, *busy):
        connection.close()
    return {"latencies": latencies, "late": late, "failed": failed + len(due) + len(busy)}


async def _main() -> None:
    async with served_here(make_app()) as port:
        print(port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as _runner:
        _runner.run(_main())
