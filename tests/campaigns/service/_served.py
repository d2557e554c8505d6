"""A real service with a token for the rows of attacks, floods, downloads and pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from killing import serving
from preloaded import Program

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


SETTINGS = f"""
folder = "service"
entry_path = "{CHARLM}"
port = 0
metrics_port = "none"
devices = ["cpu:0", "cpu:1"]
token_file = "token"
[entries."charlm:build"]
"""


class RealService(NamedTuple):
    """A running service."""

    process: Program
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
    (folder / "service.toml").write_text(SETTINGS)
    (token := folder / "token").write_text(TOKEN)
    token.chmod(0o600)
    with serving(folder, "--log-level", "warning", *options) as served:
        served.line("ready: ")
        assert served.url is not None
        yield RealService(served.process, served.url)


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
