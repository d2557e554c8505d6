"""HTTP requests at a fixed rate from another process: ``python -m asyncpipe.bench.load_generator PORT``.

The load is open-loop: requests are due at a fixed rate, whether or not earlier ones have been answered, and latency
counts from the due time. A server that stalls for a second thus causes 200 slow requests, not one. The process adds
little latency itself: one thread, open sockets, ``select``, no garbage collection.

For each turn it reads a line ``RATE SECONDS PATH`` from standard input and prints one line of JSON.
"""

from __future__ import annotations

import gc
import json
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["LoadGenerator", "load_generator"]

MOST_CONNECTIONS = 64
PATIENCE = 10.0
"""Seconds to wait for unanswered requests at the end of a turn."""


class LoadGenerator:
    """The generator's process, seen from the process that starts it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def turn(self, rate: float, seconds: float, path: str = "/") -> dict[str, Any]:
        """Send ``rate`` requests per second; blocks. Returns ``latencies`` and ``late`` in seconds, and ``failed``.

        ``late`` is the delay between each request's due time and its sending, although a connection was free: the
        generator's own part of the latency.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{rate} {seconds} {path}\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found


@contextmanager
def load_generator(port: int) -> Iterator[LoadGenerator]:
    """Start a process that sends requests to ``port`` of 127.0.0.1, for the duration of the block."""
    command = [sys.executable, "-m", __name__, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            yield LoadGenerator(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


# In the other process


@dataclass(slots=True, eq=False)
class _HttpConnection:
    socket: socket.socket
    due: float = 0.0
    received: bytes = b""

    def fileno(self) -> int:
        return self.socket.fileno()


class _RequestLoop:
    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[_HttpConnection] = []
        self._busy: list[_HttpConnection] = []
        self._latencies: list[float] = []
        self._late: list[float] = []
        self._failed = 0

    def turn(self, rate: float, seconds: float, path: str) -> dict[str, Any]:
        self._latencies, self._late, self._failed = [], [], 0
        request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\n\r\n".encode()
        first = time.perf_counter() + 0.01
        due = deque(first + number / rate for number in range(int(rate * seconds)))
        over = first + seconds + PATIENCE
        while (due or self._busy) and (now := time.perf_counter()) < over:
            while due and due[0] <= now and self._send(due[0], request):
                due.popleft()
            wait = max(0.0, due[0] - time.perf_counter()) if due else over - now
            if due and not wait:  # No connection is free: try again soon.
                wait = 0.001
            for connection in select.select(self._busy, (), (), wait)[0]:
                self._receive(connection)
        self._failed += len(due) + len(self._busy)
        for connection in self._busy:
            connection.socket.close()
        self._busy.clear()
        return {"latencies": self._latencies, "late": self._late, "failed": self._failed}

    def _send(self, due: float, request: bytes) -> bool:
        if not self._idle and len(self._busy) < MOST_CONNECTIONS:
            self._idle.append(_HttpConnection(socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE)))
            self._idle[-1].socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._idle:
            return False
        connection = self._idle.pop()
        connection.due, connection.received = due, b""
        self._late.append(time.perf_counter() - due)
        connection.socket.send(request)
        self._busy.append(connection)
        return True

    def _receive(self, connection: _HttpConnection) -> None:
        try:
            more = connection.socket.recv(65536)
        except OSError:
            more = b""
        connection.received += more
        head, complete, body = connection.received.partition(b"\r\n\r\n")
        if more and not (complete and len(body) >= _length(head)):
            return
        self._busy.remove(connection)
        if not more or not head.startswith(b"HTTP/1.1 200 "):
            self._failed += 1
            connection.socket.close()
            return
        self._latencies.append(time.perf_counter() - connection.due)
        self._idle.append(connection)


def _length(head: bytes) -> int:
    """The Content-Length in the head of an answer."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _main() -> None:
    gc.disable()
    generator = _RequestLoop(int(sys.argv[1]))
    for line in sys.stdin:
        rate, seconds, path = line.split()
        print(json.dumps(generator.turn(float(rate), float(seconds), path)), flush=True)


if __name__ == "__main__":
    _main()
