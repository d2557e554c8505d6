"""A real service with a token for the rows of attacks, floods, downloads and pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from asyncpipe.service.client import JobClient

CHARLM = Path(__file__).parents[3] / "examples" / "charlm"
TOKEN = "correct-horse-battery-staple"
JOB: dict[str, Any] = {
    "name": "served",
    "entry": "charlm:build",
    "parameters": {"width": 8, "blocks": 2, "heads": 2, "context": 16, "sample_length": 4, "max_bytes": 20_000},
    "pipeline": {"devices": ["cpu:0", "cpu:1"], "microbatches": 2},
    "training": {"steps": 500, "batch_size": 4, "learning_rate": 1e-2},
    "snapshots": {"every": 25, "keep": 3},
}


class RealService(NamedTuple):
    """A running service."""

    process: subprocess.Popen[str]
    url: str

    @property
    def place(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return str(parts.hostname), int(parts.port or 0)

    @property
    def client(self) -> JobClient:
        return JobClient(self.url, TOKEN)


@contextmanager
def serve(folder: Path, *options: str) -> Iterator[RealService]:
    """``asyncpipe serve`` with a token; ended at the end of the block."""
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    main = "import sys; from asyncpipe.cli import main; sys.exit(main())"
    where = [
        "--folder",
        "service",
        "--entries",
        "charlm:build",
        "--entry-path",
        str(CHARLM),
        "--devices",
        "cpu:0,cpu:1",
    ]
    more = ["--port", "0", "--metrics-port", "none", "--token-file", "token", "--log-level", "warning", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCPIPE_")}
    with (
        (folder / "stderr").open("w") as err,
        subprocess.Popen(
            [sys.executable, "-c", main, "serve", *where, *more],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=err, text=True,
        ) as process,
    ):  # fmt: skip
        try:
            assert process.stdout is not None
            lines: list[str] = []
            while not lines or not lines[-1].startswith("ready: "):
                lines.append(process.stdout.readline())
                assert lines[-1], (folder / "stderr").read_text() or lines
            (url,) = (found[1] for found in map(re.compile("service: (.*)").match, lines) if found)
            yield RealService(process, url)
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
