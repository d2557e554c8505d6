"""The seam between the controller and whatever starts its workers: this machine, a cluster, or somebody else.

A launcher is given an ``Invitation`` and starts a process that accepts it: ``python -m asyncpipe.worker``, which reads
the invitation's line from standard input. The worker connects to the controller and shows that it knows the secret. So
a launcher need not reach what it has started, except to hand down that line on a way that nobody else can read.
``docs/hosts.md`` has a launcher of one's own.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

from asyncpipe.core.hosts import DeviceName
from asyncpipe.runtime.task_board import TaskBoard
from asyncpipe.runtime.workers.handed_down import HandedDown
from asyncpipe.runtime.workers.handshake import secret_for
from asyncpipe.shared_memory import SharedPool

__all__ = ["Address", "Invitation", "Launcher", "PlannedWorker", "WatchedProcess", "WorkerExit", "WorkerProcess"]

Address = str | tuple[str, int]
"""The path of a Unix socket, or a host and a port."""


class PlannedWorker(NamedTuple):
    """A worker that is to be started."""

    name: str
    devices: tuple[str, ...] = ()
    """Names of those that it is to have, as ``cuda:0`` or ``host-a/cuda:0``."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Those that its devices name; there should be one at most."""
        hosts = (DeviceName.parse(device).host for device in self.devices)
        return tuple(dict.fromkeys(host for host in hosts if host))

    @property
    def accelerators(self) -> tuple[str, ...]:
        """The physical accelerators among its devices, as ``cuda:0``, each once and in their order."""
        names = [DeviceName.parse(device) for device in self.devices]
        return tuple(sorted({name.physical for name in names if not name.is_cpu}, key=_number))

    @property
    def cuda_numbers(self) -> tuple[int, ...]:
        """The numbers of its accelerators, in their order, if all are CUDA's; empty if one has none."""
        parts = [each.partition(":") for each in self.accelerators]
        is_known = all(kind == "cuda" and number for kind, _, number in parts)
        return tuple(int(number) for _, _, number in parts) if is_known else ()


def _number(device: str) -> tuple[str, int]:
    kind, _, number = device.partition(":")
    return kind, int(number or 0)


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
    devices: tuple[str, ...] = ()
    """As ``PlannedWorker.devices``."""
    path: tuple[str, ...] = ()
    """Folders in which the worker looks for modules before those of the controller's ``sys.path``."""

    def line(self) -> bytes:
        """What ``python -m asyncpipe.worker`` reads from standard input, which must stay open as long as the worker is
        to live. Holds the secret: others must not be able to read it."""
        return self.line_for(HandedDown.of_this_process(self.path))

    def line_for(self, handed_down: HandedDown, **values: object) -> bytes:
        """The line for a worker that takes over ``handed_down``, with more ``values`` for ``become_worker``."""
        return handed_down.line(invitation=self.to_json(), **values)

    def hidden(self, key: bytes) -> Invitation:
        """With a secret that tells nothing to who reads the network; the same ``key``, again, gives the true one."""
        pad = secret_for(key, f"invitation {self.token.hex()}")  # No other invitation has the token.
        return replace(self, secret=bytes(a ^ b for a, b in zip(self.secret, pad, strict=True)))

    def to_json(self) -> dict[str, Any]:
        """The invitation in the types of JSON. Holds the secret."""
        return asdict(self) | {"secret": self.secret.hex(), "token": self.token.hex()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Invitation:
        """The invitation that ``to_json`` was called on."""
        address = values["address"]
        return cls(
            values["name"],
            values["entry"],
            address if isinstance(address, str) else (address[0], address[1]),
            bytes.fromhex(values["secret"]),
            bytes.fromhex(values["token"]),
            tuple(values["devices"]),
            tuple(values["path"]),
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
    """A process that was started, as an ``asyncio.subprocess.Process`` is. Used on the loop on which it was started."""

    def kill(self) -> None:
        """End it at once, whatever it does. Does not block. May raise ``ProcessLookupError`` if it has ended."""
        ...

    async def wait(self) -> int | None:
        """Its status once it has ended, or the negative number of the signal that ended it; ``None`` if nobody knows.

        What it used of the operating system is given back then. May be cancelled, and called again.
        """
        ...


@runtime_checkable
class WatchedProcess(WorkerProcess, Protocol):
    """A process of which more is known. All of asyncpipe's own launchers start such ones."""

    board: TaskBoard | None
    """What runs in it, also when it has ended; ``None`` if it is on another host. Read on any thread."""
    batches: SharedPool | None
    """Memory for its mini-batches; ``None`` if it is on another host."""
    has_own_accelerators: bool
    """Whether it sees only the accelerators among its devices, numbered from 0 in their order."""

    def show_stacks(self) -> None:
        """Have it write to its standard error what its threads do, if that can be done. Does not block."""
        ...

    def stderr(self) -> str:
        """The end of what it wrote to its standard error; empty if that is not known."""
        ...


class Launcher(Protocol):
    """Starts processes that become workers; for ``DevicePool(workers=...)``. One launcher is used by one pool.

    Its methods are called on a loop that serves all workers of the pool, so they must not block.
    """

    async def prepare(self, workers: Sequence[PlannedWorker]) -> tuple[str, int] | None:
        """Make room for ``workers``, which are about to start; some of the names may have been prepared before.

        Returns the address of this machine at which they shall connect: a host (of one of its interfaces) and a port (0
        takes a free one), or ``None`` for a Unix socket, which only workers of this machine can reach. Raises what
        keeps them from starting, before any does.
        """
        ...

    async def start(self, invitation: Invitation) -> WorkerProcess:
        """Start a process that accepts ``invitation``; need not wait until it has. Several starts run at a time.

        Raises what kept the process from starting.
        """
        ...

    async def close(self) -> None:
        """All workers have ended: give back what was taken for them. Called once, also if nothing was prepared."""
        ...
