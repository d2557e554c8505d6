"""Workers of this machine that are taken for those of several."""

from __future__ import annotations

from collections.abc import Mapping

from asyncpipe.runtime.workers.launcher import Invitation
from asyncpipe.runtime.workers.local_process import LocalProcess
from asyncpipe.runtime.workers.place import MACHINE
from asyncpipe.runtime.workers.process_launcher import ProcessLauncher

__all__ = ["OnHosts"]


class OnHosts(ProcessLauncher):
    """Starts each worker as one of the machine that ``hosts`` says, by the worker's name; others as they are."""

    def __init__(self, hosts: Mapping[str, str]) -> None:
        super().__init__()
        self._hosts = hosts

    async def start(self, invitation: Invitation, own: Mapping[str, str] | None = None) -> LocalProcess:
        host = self._hosts.get(invitation.name)
        return await super().start(invitation, own if host is None else {**(own or {}), MACHINE: host})
