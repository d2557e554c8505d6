"""Requests at a fixed rate from a process of their own: ``python -m asyncpipe.bench.load PORT``.

Open loop: a request is due every so often, whether or not earlier ones have been answered, and its latency counts from
the moment it was due. A server that stands still for a second is thus seen as 200 slow requests, not as one. The
process does little else: sockets that stay open and ``select``, one thread, no garbage collection.

It reads a line ``RATE SECONDS PATH`` from standard input for each turn, and answers with one line of JSON.
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

__all__ = ["Load", "load"]

MOST_CONNECTIONS = 64
PATIENCE = 10.0
"""Seconds for what has not been answered at a turn's end."""


class Load:
    """The generator, seen from the process that starts it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def turn(self, rate: float, seconds: float, path: str = "/") -> dict[str, Any]:
        """``rate`` requests a second, so long; blocks. ``latencies`` and ``late`` in seconds, ``failed`` a count.

        ``late`` is how long after it was due each request was sent although a connection was free: the generator's own
        share of its latency.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{rate} {seconds} {path}\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found


@contextmanager
def load(port: int) -> Iterator[Load]:
    """A generator of requests to this port of 127.0.0.1, while the block runs."""
    command = [sys.executable, "-m", __name__, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            yield Load(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


# In the process


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    due: float = 0.0
    received: bytes = b""

    def fileno(self) -> int:
        return self.socket.fileno()


class _Generator:
    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[_Connection] = []
        self._busy: list[_Connection] = []
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
            if due and not wait:  # No connection is free.
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
            self._idle.append(_Connection(socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE)))
            self._idle[-1].socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._idle:
            return False
        connection = self._idle.pop()
        connection.due, connection.received = due, b""
        self._late.append(time.perf_counter() - due)
        connection.socket.send(request)
        self._busy.append(connection)
        return True

    def _receive(self, connection: _Connection) -> None:
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
    """What the head of an answer says of its body."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _main() -> None:
    gc.disable()
    generator = _Generator(int(sys.argv[1]))
    for line in sys.stdin:
        rate, seconds, path = line.split()
        print(json.dumps(generator.turn(float(rate), float(seconds), path)), flush=True)


if __name__ == "__main__":
    _main()
