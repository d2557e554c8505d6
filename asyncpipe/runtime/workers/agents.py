"""Workers that agents on hosts start, as their controller sees them. What the launchers of several hosts share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from asyncpipe.errors import OptionError, WorkerLostError
from asyncpipe.runtime.workers.agent import ENTRY, ChildEnded, StartChild, Strike
from asyncpipe.runtime.workers.connection import WorkerConnection
from asyncpipe.runtime.workers.group import WorkerGroup
from asyncpipe.runtime.workers.handed_down import HandedDown
from asyncpipe.runtime.workers.launcher import Invitation, Launcher, PlannedWorker
from asyncpipe.runtime.workers.supervisor import WorkerLimits

__all__ = ["AgentProcess", "Agents", "FarProcess", "Seat", "by_host", "shared_out"]

KILLED_SECONDS = 1.0
"""For who has started a process to say that it has ended, when it was told to kill it. Its host may be gone."""
PASSED_ON = ("CUBLAS_", "CUDA_", "GLOO_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_")
"""Variables of the environment that begin so are the controller's in all workers: results may depend on them."""
OWN = "CUDA_VISIBLE_DEVICES"
"""This one is that of each host."""


class FarProcess:
    """A process that somebody else has started, who says how it ends: a ``WatchedProcess``."""

    board = None
    batches = None
    has_own_accelerators = False

    def __init__(self, strike: Callable[[bool], object]) -> None:
        """``strike`` tells who has started it to kill it, or (``True``) to have it write down its stacks."""
        self._strike = strike
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int | None] = self._loop.create_future()
        self._stderr = ""

    def kill(self) -> None:
        if not self._ended.done():
            self._strike(False)
            self._loop.call_later(KILLED_SECONDS, self.end, None, "")

    def show_stacks(self) -> None:
        self._strike(True)

    async def wait(self) -> int | None:
        return await asyncio.shield(self._ended)

    def stderr(self) -> str:
        return self._stderr

    def end(self, status: int | None, stderr: str) -> None:
        """It has ended, or nobody can say."""
        if not self._ended.done():
            self._stderr = stderr
            self._ended.set_result(status)


class AgentProcess(FarProcess):
    """A worker that an agent has started."""

    has_own_accelerators = True

    def __init__(self, token: bytes, agent: WorkerConnection) -> None:
        super().__init__(self._tell)
        self.agent = agent
        self._token = token

    def _tell(self, stacks: bool) -> None:
        with suppress(WorkerLostError):
            self.agent.send(Strike(self._token, stacks), urgent=True)


class _Children:
    """Who is told what agents say. Apart from ``Agents``, since the thread of the connections holds it."""

    def __init__(self) -> None:
        self.of: dict[bytes, AgentProcess] = {}
        """By token."""

    def received(self, _: WorkerConnection, message: ChildEnded) -> None:
        if (child := self.of.pop(message.token, None)) is not None:
            child.end(message.status, message.stderr)

    def lost(self, agent: WorkerConnection, error: WorkerLostError) -> None:
        for token, child in list(self.of.items()):
            if child.agent is agent:
                del self.of[token]
                child.end(None, f"its agent, {agent.name!r}, {error.how}")


class Seat(NamedTuple):
    """Where a worker is: the agent that starts it, and those of the agent's accelerators that it sees."""

    agent: str
    accelerators: tuple[int, ...]


class Agents:
    """Used on one loop. ``launcher`` starts the agents, by their names, when they are needed."""

    def __init__(self, launcher: Launcher, environment: Mapping[str, str] | None, seconds: float) -> None:
        """``environment`` is added to that of all workers. ``seconds`` are for an agent to be up."""
        self._children = _Children()
        self._group = WorkerGroup(
            launcher,
            ENTRY,
            received=self._children.received,
            lost=self._children.lost,
            limits=WorkerLimits(start=seconds),
        )
        self._environment = dict(environment or {})
        self.seats: dict[str, Seat] = {}
        """By worker."""
        self._is_open = False
        self._turns: dict[str, asyncio.Lock] = {}

    async def start(self, invitation: Invitation) -> AgentProcess:
        """Have the agent of its seat start a worker; the agent starts before if it is not there."""
        agent, accelerators = self.seats[invitation.name]
        connection = await self._agent(agent)
        passed_on = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON) and name != OWN}
        process = AgentProcess(invitation.token, connection)
        # Before the answer: it may end at once.
        self._children.of[invitation.token] = process
        hidden = invitation.hidden(self._group.invitation_key)
        start = StartChild(
            hidden, HandedDown.of_this_process(invitation.path), passed_on | self._environment, accelerators
        )
        try:
            await connection.ask(start)
        except BaseException:
            process.kill()
            raise
        return process

    async def close(self) -> None:
        """End all agents, and the launcher."""
        if self._is_open:
            await self._group.close()

    async def _agent(self, name: str) -> WorkerConnection:
        async with self._turns.setdefault(name, asyncio.Lock()):
            if not self._is_open:
                self._is_open = True
                await self._group.__aenter__()
            if (running := self._group.workers.get(name)) is not None:
                return running
            return (await self._group.start(name))[0]


def by_host(workers: Sequence[PlannedWorker]) -> dict[str, list[PlannedWorker]]:
    """``workers`` by the host that their devices name; all under ``""`` if they name none. Raises ``OptionError``."""
    found: dict[str, list[PlannedWorker]] = {}
    for worker in workers:
        if len(worker.hosts) > 1:
            raise OptionError(f"the devices of worker {worker.name!r} are on several hosts; a worker is on one")
        found.setdefault(worker.hosts[0] if worker.hosts else "", []).append(worker)
    if "" in found and len(found) > 1:
        named = next(worker for worker in workers if worker.hosts)
        raise OptionError(
            f"{named.devices[0]!r} names a host, and {found[''][0].devices[0]!r} does not; name one for each device, "
            "or for none"
        )
    return found


def shared_out(names: Sequence[str], places: int) -> list[tuple[str, ...]]:
    """``names`` in as many groups of neighbours as there are ``places``, as equal as can be; the first are larger."""
    size, more = divmod(len(names), places)
    ends = [(place + 1) * size + min(place + 1, more) for place in range(places)]
    return [tuple(names[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
