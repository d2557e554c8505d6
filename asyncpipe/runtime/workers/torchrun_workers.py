"""Workers in the processes that ``torchrun`` has started; see ``torchrun.py`` for how they meet."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

from asyncpipe.core.hosts import DeviceName
from asyncpipe.errors import OptionError
from asyncpipe.runtime.workers.agents import AgentProcess, Agents, FarProcess, Seat, by_host, shared_out
from asyncpipe.runtime.workers.child_process import PROGRAM
from asyncpipe.runtime.workers.launcher import Invitation, PlannedWorker
from asyncpipe.runtime.workers.torchrun import Rank, RankHere, Rendezvous, rendezvous

__all__ = ["TorchrunWorkers"]


class TorchrunWorkers:
    """The ranks that torchrun has started besides 0: ``DevicePool(workers=TorchrunWorkers())``. For one pool.

    **In every other rank, making one never returns**: the process is replaced by one that serves rank 0, and ends with
    it. Rank 0 is the controller and has no workers. A rank starts the workers of its devices as processes of its own.
    Devices without a host are shared out over the ranks in their order, neighbours together; on each host, CUDA devices
    count from 0. Devices with a host (as ``hostname`` says it) are shared out over the ranks of that host.

    On several hosts, all need one secret in the environment variable ``ASYNCPIPE_SECRET``; the controller listens at
    torchrun's ``MASTER_ADDR``, port ``MASTER_PORT`` + 1 (or ``ASYNCPIPE_CONTROL_PORT``). Raises ``OptionError``
    where torchrun has not started this process. ``environment`` is added to that of workers. ``seconds`` is how long to
    wait for the other ranks.
    """

    def __init__(self, *, environment: Mapping[str, str] | None = None, seconds: float = 120.0) -> None:
        self._own = Rank.of_this_process()
        if self._own.rank:
            sys.stdout.flush()
            sys.stderr.flush()
            os.execv(sys.executable, [sys.executable, str(PROGRAM), "--torchrun-rank"])  # noqa: S606 - our own program
        if self._own.world_size < 2:
            raise OptionError(
                "torchrun has started one process, which is the controller; give --nproc-per-node one more than shall "
                "serve it"
            )
        self._seconds = seconds
        self._rendezvous = rendezvous(self._own)
        self._agents = Agents(_Ranks(self._rendezvous), environment, seconds)
        self._ranks: list[RankHere] = []
        self.seats = self._agents.seats
        self._accelerators: Counter[str] = Counter()
        """By host: how many the workers have that name no host."""

    async def prepare(self, workers: Sequence[PlannedWorker]) -> tuple[str, int] | None:
        """Wait for all ranks, and give each of ``workers`` a place."""
        self._ranks = await asyncio.to_thread(self._rendezvous.all_here, self._seconds)
        self._place([worker for worker in workers if worker.name not in self.seats])
        return None if self._own.is_one_host else (self._rendezvous.address, 0)

    async def start(self, invitation: Invitation) -> AgentProcess:
        """Have its rank start it."""
        return await self._agents.start(invitation)

    async def close(self) -> None:
        """The ranks wait for the next pool, or for the end of this process."""
        await self._agents.close()

    def _place(self, workers: Sequence[PlannedWorker]) -> None:
        for host, members in by_host(workers).items():
            ranks = [each for each in self._ranks if host in ("", each.host, each.host.partition(".")[0])]
            if not ranks:
                there = ", ".join(sorted({each.host for each in self._ranks}))
                raise OptionError(f"no rank that serves is on host {host}; torchrun has started some on {there}")
            for each, names in zip(ranks, shared_out([w.name for w in members], len(ranks)), strict=True):
                for worker in members:
                    if worker.name in names:
                        self.seats[worker.name] = Seat(f"rank {each.rank}", self._accelerators_of(worker, each.host))

    def _accelerators_of(self, worker: PlannedWorker, host: str) -> tuple[int, ...]:
        if worker.hosts:
            return tuple([int(DeviceName.parse(each).device.partition(":")[2] or 0) for each in worker.accelerators])
        first = self._accelerators[host]
        self._accelerators[host] += len(worker.accelerators)
        return tuple(range(first, self._accelerators[host]))


class _Ranks:
    """A launcher of agents, which torchrun has started."""

    def __init__(self, met: Rendezvous) -> None:
        self._rendezvous = met

    async def prepare(self, workers: Sequence[PlannedWorker]) -> tuple[str, int] | None:
        """They are there."""
        return None if self._rendezvous.own.is_one_host else (self._rendezvous.address, 0)

    async def start(self, invitation: Invitation) -> FarProcess:
        rank = int(invitation.name.split()[1])
        ended = asyncio.wrap_future(self._rendezvous.begin(rank, invitation.hidden(self._rendezvous.secret).line()))
        process = FarProcess(lambda stacks: None if stacks else self._rendezvous.hang_up(rank))
        ended.add_done_callback(lambda ended: process.end(ended.result(), ""))
        return process

    async def close(self) -> None:
        """Torchrun's processes are not ours to end."""
