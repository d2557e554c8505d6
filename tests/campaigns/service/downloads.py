"""A model is downloaded while its job trains: cut off again and again, by the network, the client's end, the service's.

At each cut, the job takes a newer snapshot before the download goes on; so it goes on with one that is not the newest.
"""

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
from time import monotonic, sleep
from typing import Any

from asyncpipe.service.client import AsyncJobClient, JobClient
from tests.campaigns.service import Row
from tests.campaigns.service._flooded import JOB, TOKEN, Flooded, serve

PIECE = 150_000
"""Bytes of a response after which the line is cut."""
SECONDS = 60.0
TRAINING: dict[str, Any] = JOB | {
    "name": "downloaded",
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
    cuts: int = 0
    ranges: list[int] = field(default_factory=list)
    """Where the ranges begin that were asked for."""
    passed: int = 0
    """Bytes of artifacts, without heads."""

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
                if not is_download:
                    one.sendall(data)
                    continue
                if body < 0:
                    body = 0
                    before, _, rest = data.partition(b"\r\n\r\n")
                    one.sendall(before + b"\r\n\r\n")
                    data = rest
                data = data[: PIECE - body]
                one.sendall(data)
                body += len(data)
                self.passed += len(data)
                if body >= PIECE:
                    self.cuts += 1
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

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield line
        finally:
            listening.shutdown(socket.SHUT_RDWR)
    thread.join(SECONDS)


def newest(client: JobClient, job: str) -> int:
    """The step of the job's newest snapshot; 0 before the first."""
    return int(str(client.show(job)["snapshot"] or "step-0").removeprefix("step-"))


def newer(client: JobClient, job: str, than: int) -> int:
    """The step of a snapshot that is newer, when it is there."""
    deadline = monotonic() + SECONDS
    while (found := newest(client, job)) <= than:
        assert monotonic() < deadline, f"no snapshot after that of step {than}"
        sleep(0.05)
    return found


def has(folder: Path, size: int) -> None:
    """Wait until the file in ``folder`` has so many bytes."""
    deadline = monotonic() + SECONDS
    while not any(path.stat().st_size >= size for path in folder.iterdir()):
        assert monotonic() < deadline, f"nothing has {size} bytes"
        sleep(0.01)


def same_as(snapshots: Path, model: Path) -> int | None:
    """The step of the snapshot that has this model, byte for byte."""
    content = model.read_bytes()
    found = [path for path in snapshots.glob("step-*/model.pt") if path.read_bytes() == content]
    return int(found[0].parent.name.removeprefix("step-")) if found else None


def run(folder: Path) -> list[Row]:
    """Both clients, the command, and the service killed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rows = []
    with serve(folder, "--port", str(port)) as service:
        client = JobClient(service.url, TOKEN, retries=20)
        job = client.submit(TRAINING)["id"]
        snapshots = folder / "service" / "jobs" / job / "snapshots"
        for kind in (JobClient, AsyncJobClient):
            rows.append(_cut(kind, service, client, job, snapshots, folder / kind.__name__))
        rows.append(_client_killed(service, client, job, snapshots, folder))
        rows.append(_service_killed(folder, port, service, client, job, snapshots))
    return rows


def _cut(kind: type, service: Flooded, client: JobClient, job: str, snapshots: Path, to: Path) -> Row:
    """The line is cut again and again."""
    to.mkdir()
    with line_to(service.place) as line:
        at = newer(client, job, 0)

        def another() -> None:
            nonlocal at
            at = newer(client, job, at)

        line.cut = another
        asked = kind(f"http://127.0.0.1:{line.port}", TOKEN, timeout=SECONDS)
        found = asked.download(job, to=to)
        model = asyncio.run(found) if asyncio.iscoroutine(found) else found
    step, size = same_as(snapshots, model), model.stat().st_size
    figure = (
        f"{size:,} bytes in {line.cuts + 1} pieces, {line.passed - size} twice; that of step {step}, byte for byte, "
        f"while the job went on to {newest(client, job)}"
    )
    good = step is not None and line.cuts > 2 and line.ranges == [PIECE * (n + 1) for n in range(line.cuts)]
    left = [path.name for path in to.iterdir()]
    what = f"a model is downloaded by {kind.__name__} while its job trains; the line is cut every {PIECE:,} bytes"
    return Row(what, figure, held=good and line.passed == size and left == ["model.pt"])


def _client_killed(service: Flooded, client: JobClient, job: str, snapshots: Path, folder: Path) -> Row:
    """The command is killed when it has some bytes, and given again."""
    to = folder / "killed"
    to.mkdir()
    with line_to(service.place) as line:
        code = "import sys; from asyncpipe.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "jobs", "download", job, "--to", str(to)]
        command += ["--url", f"http://127.0.0.1:{line.port}", "--token-file", str(folder / "token")]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            line.cut = lambda: (has(to, PIECE), process.kill())
            killed = process.wait(SECONDS) == -signal.SIGKILL
        (part,) = to.iterdir()
        begun = part.stat().st_size
        at = newer(client, job, newest(client, job))
        line.cut = lambda: None
        subprocess.run(command, check=True, timeout=SECONDS, stdout=subprocess.DEVNULL)
    step = same_as(snapshots, to / "model.pt")
    size = (to / "model.pt").stat().st_size
    figure = (
        f"{begun:,} bytes were kept, {line.passed - size} came twice; that of step {step}, byte for byte (newest: {at})"
    )
    good = killed and step is not None and line.ranges[0] == begun and step < at
    return Row("`asyncpipe jobs download` is killed with kill -9, and given again", figure, held=good)


def _service_killed(folder: Path, port: int, service: Flooded, client: JobClient, job: str, snapshots: Path) -> Row:
    """The service is killed during a download, and started again."""
    to = folder / "survived"
    to.mkdir()
    with line_to(service.place) as line:
        line.cut = service.process.kill
        found: list[Path] = []
        asked = JobClient(f"http://127.0.0.1:{line.port}", TOKEN, timeout=SECONDS, retries=50)
        downloads = threading.Thread(target=lambda: found.append(asked.download(job, to=to)), daemon=True)
        downloads.start()
        service.process.wait(SECONDS)
        line.cut = lambda: None
        with serve(folder, "--port", str(port)):
            downloads.join(SECONDS)
            model = found[0]
            newer(client, job, newest(client, job))
            client.cancel(job)
    step, size = same_as(snapshots, model), model.stat().st_size
    figure = f"{line.passed - size} bytes came twice; that of step {step}, byte for byte; the job went on"
    good = step is not None and bool(line.ranges) and line.ranges[0] == PIECE
    return Row("the service is killed with kill -9 during a download, and started again", figure, held=good)
