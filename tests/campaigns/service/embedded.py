"""The service in an application of somebody else (``examples/embedded_service``), which SIGTERM ends under uvicorn."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from urllib.request import Request, urlopen

from asyncpipe.service.client import JobClient
from tests.campaigns.service import Row

__all__ = ["run"]

ROOT = Path(__file__).parents[3]


def run(folder: Path) -> list[Row]:
    """One row: a job is submitted, its stream read and its page loaded; the host ends; the next one goes on."""
    with application(folder) as (process, url):
        asked = Request(f"{url}/models?steps=1000000", method="POST")
        with urlopen(asked) as answer:
            job = json.load(answer)["id"]
        with urlopen(f"{url}/training/") as answer:
            page = b"<html" in answer.read()
        events: list[bytes] = []
        trains = threading.Event()

        def follow() -> None:
            with urlopen(f"{url}/training/v1/jobs/{job}/events") as stream:
                for line in stream:
                    if line.startswith(b"event: "):
                        events.append(line[7:].strip())
                        if events[-1] == b"step":
                            trains.set()

        following = threading.Thread(target=follow)
        following.start()
        assert trains.wait(60)
        begun = monotonic()
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
        seconds = monotonic() - begun
        following.join(10)
    with application(folder) as (_, url):
        later = JobClient(f"{url}/training").show(job)
    goes_on = later["state"] in ("queued", "running") and later["snapshot"] is not None
    steps = events.count(b"step")
    figure = f"page loaded, {steps} steps followed, ended {seconds:.2f} s after SIGTERM with {status} (uvicorn's own); "
    figure += f"at the next start {later['state']}, with {later['snapshot']}"
    held = page and goes_on and status in (0, -signal.SIGTERM) and not following.is_alive()
    return [Row("mounted in another FastAPI application, SIGTERM while a stream is read", figure, held)]


@contextmanager
def application(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The example under uvicorn, as a person runs it; yields its process and its URL."""
    example = str(ROOT / "examples" / "embedded_service")
    command = [sys.executable, "-m", "uvicorn", "--factory", "--app-dir", example, "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command += ["--no-access-log", "--timeout-graceful-shutdown", "2", "app:application"]
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"running on (http://127\.0\.0\.1:\d+)", line):
                    break
            else:
                raise RuntimeError("uvicorn has not started")
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield process, found[1]
        finally:
            process.terminate()
            process.wait(60)
