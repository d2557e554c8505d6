"""The seam between the controller and whatever starts its workers: this machine, a cluster, or somebody else.

A launcher is given an ``Invitation`` and answers with a ``WorkerProcess``. What it starts connects to the invitation's
address and shows that it knows the secret. So a launcher need not reach the process that it starts, except to hand down
the invitation on a way that nobody else can read.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncpipe.runtime.task_board import TaskBoard
from asyncpipe.runtime.workers.batch_memory import BatchMemory

__all__ = ["Address", "Invitation", "Launcher", "WorkerExit", "WorkerProcess"]

Address = str | tuple[str, int]
"""The path of a Unix socket, or a host and a port."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """What a process needs to become the worker ``name``."""

    name: str
    entry: str
    """``module:function``: an async function that is given the worker's ``ControlClient``. The worker ends with it."""
    address: Address
    secret: bytes = field(repr=False)
    token: bytes = field(repr=False)
    """Names this start: a worker that comes too late is not taken for its successor."""

    def to_json(self) -> dict[str, Any]:
        """The invitation in the types of JSON. Holds the secret."""
        return {
            "name": self.name,
            "entry": self.entry,
            "address": self.address,
            "secret": self.secret.hex(),
            "token": self.token.hex(),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Invitation:
        """The invitation that ``to_json`` was called on."""
        address = values["address"]
        return cls(
            values["name"],
            values["entry"],
            address if isinstance(address, str) else (address[0], address[1]),
            bytes.fromhex(values["secret"]),
            bytes.fromhex(values["token"]),
        )


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a process ended: its status, or the negative number of the signal that ended it; ``None`` if nobody knows."""

    status: int | None

    def __str__(self) -> str:
        if self.status is None:
            return "ended, with a status that is not known"
        if self.status >= 0:
            return f"exited with status {self.status}"
        try:
            return f"was killed by {signal.Signals(-self.status).name}"
        except ValueError:  # Real-time signals have no names.
            return f"was killed by signal {-self.status}"


class WorkerProcess(Protocol):
    """A process that was started. Its methods are called on the loop on which it was started."""

    board: TaskBoard | None
    """What runs in it, also when it has ended; ``None`` if it is on another host. Read on any thread."""
    batches: BatchMemory | None
    """Memory for its mini-batches; ``None`` if it is on another host."""

    def kill(self) -> None:
        """End it at once, whatever it does. Does not block. Does nothing if it has ended."""
        ...

    def show_stacks(self) -> None:
        """Have it write to its standard error what its threads do, if that can be done. Does not block."""
        ...

    async def ended(self) -> WorkerExit:
        """How it ended, once it has. What it used of the operating system is given back then. May be called again."""
        ...

    def stderr(self) -> str:
        """The end of what it wrote to its standard error; empty if that is not known."""
        ...


class Launcher(Protocol):
    """Starts processes that become workers."""

    async def start(self, invitation: Invitation) -> WorkerProcess:
        """Start a process that accepts ``invitation``; need not wait until it has. Several starts run at a time.

        Called on a loop that serves all workers, so it must not block. Raises what kept the process from starting.
        """
        ...
