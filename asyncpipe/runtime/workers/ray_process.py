"""The process that Ray's driver is in, as the controller sees it. Nothing here imports Ray."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from asyncpipe.errors import LauncherError

__all__ = ["RayProcess"]

PROGRAM = Path(__file__).parents[2] / "worker" / "ray_driver.py"
END_SECONDS = 20.0
"""For Ray to shut down."""
STDERR_BYTES = 2000
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Otherwise Ray warns of what it will do one day.
    "RAY_DEDUP_LOGS": "0",
}


class RayProcess:
    """Started when it is made. Commands may be given from any loop, and are answered when they are done.

    It ends when nobody holds it, and when this process does: it reads a pipe that only this process can write to.
    """

    def __init__(self) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - read when something fails
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **QUIET},
            start_new_session=True,  # Ctrl-C means the controller.
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._asked: dict[int, concurrent.futures.Future[Any]] = {}
        self._numbers = count()
        self._reader = threading.Thread(
            target=_read, args=(self._process.stdout, self._asked, self._stderr), name="asyncpipe ray", daemon=True
        )
        self._reader.start()

    def begin(self, do: str, **arguments: Any) -> tuple[int, concurrent.futures.Future[Any]]:
        """Give a command; its number, and its answer, which raises ``LauncherError`` where Ray does. Does not block."""
        number = next(self._numbers)
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._asked[number] = answer
        line = json.dumps({"number": number, "do": do, **arguments}).encode() + b"\n"
        try:
            self._stdin.write(line)
            self._stdin.flush()
        except (OSError, ValueError):
            self._reader.join()
            if not answer.done():
                answer.set_exception(LauncherError(f"Ray's process has ended{_last_words(self._stderr)}"))
        return number, answer

    async def ask(self, do: str, **arguments: Any) -> Any:
        """As ``begin``; the answer."""
        return await asyncio.wrap_future(self.begin(do, **arguments)[1])

    async def close(self) -> None:
        """Have it end what it has started; a process that does not end is killed."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()


def _read(answers: Any, asked: Mapping[int, concurrent.futures.Future[Any]], stderr: Any) -> None:
    for line in answers:
        answer = json.loads(line)
        future = asked[answer["number"]]
        if future.cancelled():
            continue
        if "error" in answer:
            future.set_exception(LauncherError(answer["error"]))
        else:
            future.set_result(answer["value"])
    lost = LauncherError(f"Ray's process has ended{_last_words(stderr)}")
    for future in list(asked.values()):
        if not future.done():
            future.set_exception(lost)


def _last_words(stderr: Any) -> str:
    with suppress(OSError, ValueError):
        stderr.seek(max(0, os.fstat(stderr.fileno()).st_size - STDERR_BYTES))
        if words := stderr.read().decode(errors="replace").strip():
            return f"; it wrote last: {words}"
    return ""
