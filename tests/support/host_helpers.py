"""Workers of this machine that stand for hosts, which can be switched off."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from asyncpipe.core.hosts import unit_of
from asyncpipe.errors import LauncherError
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.runtime.workers.launcher import Invitation, PlannedWorker, WorkerProcess
from asyncpipe.runtime.workers.process_launcher import ProcessLauncher

__all__ = ["Hosts"]


class Hosts:
    """Which hosts are ``off``: no worker can be started there. Nor is it at ``silent`` ones, where nobody answers, nor
    at any while there is no ``room``."""

    def __init__(self) -> None:
        self.room = True
        self.off: set[str] = set()
        self.silent: set[str] = set()
        self.asked = threading.Event()
        """Set when a silent one was asked to start a worker."""

    @contextmanager
    def pool(self, **options: Any) -> Iterator[DevicePool]:
        """A pool that is not open, whose workers are on these hosts."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("asyncpipe.pipeline.workers.ProcessLauncher", self._launcher)
            yield DevicePool(workers="processes", **options)

    def _launcher(self, **options: Any) -> ProcessLauncher:
        hosts = self

        class Launcher(ProcessLauncher):
            async def prepare(self, workers: Sequence[PlannedWorker]) -> None:
                if not hosts.room:
                    raise LauncherError("the cluster has had no room")

            async def start(self, invitation: Invitation) -> WorkerProcess:
                if unit_of(invitation.name) in hosts.silent:
                    hosts.asked.set()
                    await asyncio.Event().wait()
                if unit_of(invitation.name) in hosts.off:
                    raise OSError(f"no route to {invitation.name}")
                return await super().start(invitation)

        return Launcher(**options)
