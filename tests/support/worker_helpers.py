"""Groups of real worker processes for tests, and what may be left of them: nothing."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncpipe.errors import WorkerLostError
from asyncpipe.runtime.workers.connection import WorkerConnection
from asyncpipe.runtime.workers.group import WorkerGroup
from asyncpipe.runtime.workers.launcher import Launcher
from asyncpipe.runtime.workers.process_launcher import ProcessLauncher

__all__ = ["SECONDS", "Recorded", "folders", "is_alive", "open_files", "until"]

SECONDS = 30.0
"""For another process to get somewhere, on a machine that is busy."""


class Recorded:
    """A group of workers that do what ``worker_entries.Deeds`` can, and what was heard of them."""

    def __init__(self, entry: str = "deeds", launcher: Launcher | None = None, **options: Any) -> None:
        self.heard: list[Any] = []
        """Messages, and losses, in the order of their coming."""
        self.losses: asyncio.Queue[WorkerLostError] = asyncio.Queue()
        self.group = WorkerGroup(
            launcher or ProcessLauncher(),
            f"worker_entries:{entry}",
            received=lambda worker, message: self.heard.append((worker.name, message)),
            lost=self._lost,
            **options,
        )

    def _lost(self, worker: WorkerConnection, error: WorkerLostError) -> None:
        assert worker.lost is error
        self.heard.append((worker.name, error))
        self.losses.put_nowait(error)

    async def loss(self) -> WorkerLostError:
        """The next loss."""
        async with asyncio.timeout(SECONDS):
            return await self.losses.get()


async def until(what: str, is_true: Callable[[], object]) -> None:
    """Wait for what another process or thread brings about."""
    deadline = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < deadline, f"not within {SECONDS:g} s: {what}"
        await asyncio.sleep(0.005)


def is_alive(pid: int) -> bool:
    """Whether the process is there; one that has ended, and whose parent has not asked for it yet, is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_there(pid: int) -> bool:
    """Whether anything is left of the process, be it a zombie."""
    return Path(f"/proc/{pid}").exists()


def folders() -> list[Path]:
    """The folders for sockets, of controllers with this process's folder of temporary files."""
    return list(Path(tempfile.gettempdir()).glob("asyncpipe-*"))


def open_files() -> int:
    """How many file descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))
