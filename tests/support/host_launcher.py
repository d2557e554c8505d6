"""Workers of this machine that are taken for those of several."""

from __future__ import annotations

from collections.abc import Mapping

from asyncpipe.runtime.workers.launcher import Invitation
from asyncpipe.runtime.workers.place import MACHINE
from asyncpipe.runtime.workers.process_launcher import LocalProcess, ProcessLauncher

__all__ = ["OnHosts"]


class OnHosts(ProcessLauncher):
    """Starts each worker as one of the machine that ``hosts`` says, by the worker's name; others as they are."""

    def __init__(self, hosts: Mapping[str, str]) -> None:
        super().__init__()
        self._on = {name: ProcessLauncher({MACHINE: host}) for name, host in hosts.items()}

    async def start(self, invitation: Invitation) -> LocalProcess:
        if (launcher := self._on.get(invitation.name)) is not None:
            return await launcher.start(invitation)
        return await super().start(invitation)
