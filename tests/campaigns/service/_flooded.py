"""A real service for the rows of floods, and the flood: sockets without a token, that stay or come again and again."""

from __future__ import annotations

import os
import re
import resource
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from asyncpipe.service.client import JobClient

CHARLM = Path(__file__).parents[3] / "examples" / "charlm"
TOKEN = "correct-horse-battery-staple"
JOB: dict[str, Any] = {
    "name": "flooded",
    "entry": "charlm:build",
    "parameters": {"width": 8, "blocks": 2, "heads": 2, "context": 16, "sample_length": 4, "max_bytes": 20_000},
    "pipeline": {"devices": ["cpu:0", "cpu:1"], "microbatches": 2},
    "training": {"steps": 500, "batch_size": 4, "learning_rate": 1e-2},
    "snapshots": {"every": 25, "keep": 3},
}


class Flooded(NamedTuple):
    """A running service."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str]
    """What it printed when it started."""

    @property
    def place(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return str(parts.hostname), int(parts.port or 0)

    @property
    def metrics(self) -> tuple[str, int]:
        found = re.search("^metrics: http://[^:]*:([0-9]+)/metrics$", "\n".join(self.lines), re.M)
        assert found is not None, self.lines
        return "127.0.0.1", int(found[1])

    @property
    def client(self) -> JobClient:
        return JobClient(self.url, TOKEN)

    def open_files(self) -> int:
        """How many descriptors the process has."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@contextmanager
def serve(folder: Path, *options: str, files: int | None = None) -> Iterator[Flooded]:
    """``asyncpipe serve`` with a token, whose process may open so many ``files``; ended at the end of the block."""
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    main = "import sys; from asyncpipe.cli import main; sys.exit(main())"
    arguments = [
        "--folder",
        "service",
        "--entry",
        "charlm:build",
        "--entry-path",
        str(CHARLM),
        "--devices",
        "cpu:0,cpu:1",
    ]
    arguments += ["--port", "0", "--metrics-port", "0", "--token-file", "token", "--log-level", "warning", *options]

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    with (
        (folder / "stderr").open("w") as err,
        subprocess.Popen(
            [sys.executable, "-c", main, "serve", *arguments],
            cwd=folder, stdout=subprocess.PIPE, stderr=err, text=True, preexec_fn=limit,
        ) as process,
    ):  # fmt: skip
        try:
            assert process.stdout is not None
            lines: list[str] = []
            for line in process.stdout:
                lines.append(line.rstrip())
                if line.startswith("ready: "):
                    break
            else:
                raise RuntimeError((folder / "stderr").read_text() or "\n".join(lines))
            (url,) = (found[1] for found in map(re.compile("service: (.*)").match, lines) if found)
            yield Flooded(process, url, lines)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()


def ask(place: tuple[str, int], path: str, token: str | None = None) -> tuple[int | None, float]:
    """The status of a request on a connection of its own, ``None`` for no answer in 5 s; and the seconds it took."""
    begun = monotonic()
    connection = HTTPConnection(*place, timeout=5)
    try:
        connection.request("GET", path, headers={} if token is None else {"Authorization": f"Bearer {token}"})
        return connection.getresponse().status, monotonic() - begun
    except OSError:
        return None, monotonic() - begun
    finally:
        connection.close()


def answered(place: tuple[str, int], path: str, times: int, token: str | None = None) -> tuple[int, float]:
    """How many of so many requests were answered with 200, and the longest time of one."""
    asked = [ask(place, path, token) for _ in range(times)]
    return sum(status == 200 for status, _ in asked), max(seconds for _, seconds in asked)


@contextmanager
def held(place: tuple[str, int], sockets: int) -> Iterator[None]:
    """So many connections that send nothing, each opened again as soon as the service closes it."""
    with ExitStack() as stack:
        ended = stack.enter_context(_ended_at_exit())
        opened = threading.Event()
        thread = threading.Thread(target=_hold, args=(place, sockets, opened, ended))
        thread.start()
        stack.callback(thread.join)
        assert opened.wait(60)
        yield
        ended.set()


@contextmanager
def stormed(place: tuple[str, int], threads: int = 2) -> Iterator[list[int]]:
    """Connections that are opened and left as fast as can be; yields their number by thread."""
    counts = [0] * threads
    with _ended_at_exit() as ended:
        storm = [threading.Thread(target=_storm, args=(place, counts, index, ended)) for index in range(threads)]
        for each in storm:
            each.start()
        try:
            yield counts
        finally:
            ended.set()
            for each in storm:
                each.join()


@contextmanager
def _ended_at_exit() -> Iterator[threading.Event]:
    ended = threading.Event()
    try:
        yield ended
    finally:
        ended.set()


def _hold(place: tuple[str, int], sockets: int, opened: threading.Event, ended: threading.Event) -> None:
    with selectors.DefaultSelector() as selector:
        try:
            while not ended.is_set():
                while len(selector.get_map()) < sockets and not ended.is_set():
                    client = socket.socket()
                    client.settimeout(5)
                    try:
                        client.connect(place)
                    except OSError:
                        client.close()
                        break
                    client.setblocking(False)
                    selector.register(client, selectors.EVENT_READ)
                else:
                    opened.set()
                for key, _ in selector.select(0.05):
                    gone = key.fileobj
                    assert isinstance(gone, socket.socket)
                    with suppress(OSError):
                        if gone.recv(65536):
                            continue
                    selector.unregister(gone)
                    gone.close()
        finally:
            for key in list(selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()


def _storm(place: tuple[str, int], counts: list[int], index: int, ended: threading.Event) -> None:
    kept: list[socket.socket] = []
    while not ended.is_set():
        client = socket.socket()
        client.settimeout(5)
        try:
            client.connect(place)
        except OSError:
            client.close()
            continue
        counts[index] += 1
        kept.append(client)
        if len(kept) > 600:
            kept.pop(0).close()
    for client in kept:
        client.close()
