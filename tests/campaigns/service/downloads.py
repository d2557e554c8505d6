"""A model is downloaded while its job trains, and cut off again and again: by the network, the client, the service."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from killing import poll

from asyncpipe.service.client import AsyncJobClient, JobClient
from tests.campaigns.service import Row
from tests.campaigns.service._served import JOB, TOKEN, serve

PIECE = 150_000
"""Bytes of a response after which the line is cut."""
SECONDS = 60.0
TRAINING: dict[str, Any] = JOB | {
    "parameters": JOB["parameters"] | {"width": 96},
    "training": JOB["training"] | {"steps": 10**6},
    "snapshots": {"every": 10, "keep": 3, "keep_every": 1},
}


@dataclass
class Line:
    """A line to the service that is cut after ``PIECE`` bytes of a download; ``cut`` is called then."""

    to: tuple[str, int]
    cut: Callable[[], object] = lambda: None
    port: int = 0
    ranges: list[int] = field(default_factory=list)
    """Where the ranges begin that were asked for."""

    def serve(self, one: socket.socket) -> None:
        """Pass on one request and its answer."""
        body = -1
        with one, suppress(OSError), socket.create_connection(self.to, timeout=SECONDS) as other:
            head = one.recv(65536)
            other.sendall(head)
            is_download = b"/artifacts/" in head.split(b"\r\n", 1)[0]
            if is_download and (found := re.search(rb"(?i)\r\nrange: bytes=(\d+)-", head)):
                self.ranges.append(int(found[1]))
            while data := other.recv(65536):
                if is_download and body < 0:
                    before, _, data = data.partition(b"\r\n\r\n")
                    one.sendall(before + b"\r\n\r\n")
                    body = 0
                data = data[: PIECE - body] if is_download else data
                one.sendall(data)
                body += len(data)
                if is_download and body >= PIECE:
                    self.cut()
                    break


@contextmanager
def line_to(place: tuple[str, int]) -> Iterator[Line]:
    """A line on a port of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        line = Line(place, port=listening.getsockname()[1])

        def accept() -> None:
            with suppress(OSError):
                while True:
                    line.serve(listening.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield line
        finally:
            listening.shutdown(socket.SHUT_RDWR)


def run(folder: Path) -> list[Row]:
    """Both clients, the command, and the service killed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rows = []
    with serve(folder, "--port", str(port)) as service:
        client = JobClient(service.url, TOKEN, retries=20)
        job = client.submit(TRAINING)["id"]
        newest = poll("a snapshot", lambda: client.show(job)["snapshot"], 0.05, SECONDS)
        step = int(newest.removeprefix("step-"))
        model = folder / "service" / "jobs" / job / "snapshots" / newest / "model.pt"

        def row(what: str, line: Line, to: Path, held: bool = True) -> None:
            same = (to / "model.pt").read_bytes() == model.read_bytes()
            pieces = [PIECE * number for number in range(1, len(line.ranges) + 1)]
            figure = (
                f"{model.stat().st_size:,} bytes in {len(line.ranges) + 1} pieces, {'the same' if same else 'other'}"
            )
            alone = [path.name for path in to.iterdir()] == ["model.pt"]
            rows.append(Row(what, figure, held and same and alone and bool(pieces) and line.ranges == pieces))

        for kind in (JobClient, AsyncJobClient):
            (to := folder / kind.__name__).mkdir()
            with line_to(service.place) as line:
                asked = kind(f"http://127.0.0.1:{line.port}", TOKEN, timeout=SECONDS)
                found = asked.download(job, to=to, step=step)
                asyncio.run(found) if asyncio.iscoroutine(found) else found
            row(f"a model is downloaded by {kind.__name__}; the line is cut every {PIECE:,} bytes", line, to)

        (to := folder / "killed").mkdir()
        with line_to(service.place) as line:
            command = [sys.executable, "-m", "asyncpipe", "jobs", "download", job, "--to", str(to), "--step", str(step)]
            command += ["--url", f"http://127.0.0.1:{line.port}", "--token-file", str(folder / "token")]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
                # When it has written the first piece.
                line.cut = lambda: (
                    poll("a piece", lambda: any(path.stat().st_size >= PIECE for path in to.iterdir()), 0.01, SECONDS),
                    process.kill(),
                )
                killed = process.wait(SECONDS) == -signal.SIGKILL
            line.cut = lambda: None
            subprocess.run(command, check=True, timeout=SECONDS, stdout=subprocess.DEVNULL)
        row("`asyncpipe jobs download` is killed with kill -9, and given again", line, to, killed)

        (to := folder / "survived").mkdir()
        with line_to(service.place) as line:
            line.cut = service.process.kill
            asked = JobClient(f"http://127.0.0.1:{line.port}", TOKEN, timeout=SECONDS, retries=50)
            downloads = threading.Thread(target=lambda: asked.download(job, to=to, step=step), daemon=True)
            downloads.start()
            service.process.wait(SECONDS)
            line.cut = lambda: None
            with serve(folder, "--port", str(port)):
                downloads.join(SECONDS)
                client.cancel(job)
        row("the service is killed with kill -9 during a download, and started again", line, to)
    return rows
