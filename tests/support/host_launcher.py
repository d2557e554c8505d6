"""Workers of this machine that are taken for those of several, with clocks of their own."""

from __future__ import annotations

import time
from collections.abc import Mapping

from asyncpipe.pipeline.resident.serve import serve
from asyncpipe.runtime.workers.control_client import ControlClient
from asyncpipe.runtime.workers.launcher import Invitation
from asyncpipe.runtime.workers.local_process import LocalProcess
from asyncpipe.runtime.workers.place import MACHINE
from asyncpipe.runtime.workers.process_launcher import ProcessLauncher
from tests.support.shaped_edges import install

__all__ = ["SKEW", "OnHosts", "serve_with_another_clock"]

SKEW = 1000.0
"""Seconds that the clock of worker ``cpu:1`` is ahead."""


class OnHosts(ProcessLauncher):
    """Starts each worker as one of the machine that ``hosts`` says, by the worker's name; others as they are."""

    def __init__(self, hosts: Mapping[str, str]) -> None:
        super().__init__()
        self._hosts = hosts

    async def start(self, invitation: Invitation, own: Mapping[str, str] | None = None) -> LocalProcess:
        host = self._hosts.get(invitation.name)
        return await super().start(invitation, own if host is None else {**(own or {}), MACHINE: host})


async def serve_with_another_clock(control: ControlClient) -> None:
    """A worker's entry, as the package's own, with edges that can be shaped."""
    install()
    if control.name == "cpu:1":
        right = time.perf_counter
        time.perf_counter = lambda: right() + SKEW  # type: ignore[assignment]
    await serve(control)
