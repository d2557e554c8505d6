"""The worker processes of a device pool, in the controller: which there are, and which devices each has.

::

    DevicePool(workers="processes") ── Workers ──┬── WorkerGroup     starts them, and knows when one is gone
                                                 └── PartsDriver     runs steps in them
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import fields
from itertools import count
from typing import Any

from torch import distributed

from asyncpipe.core.hosts import DeviceName
from asyncpipe.errors import OptionError, WorkerLostError
from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.device.wire import to_wire
from asyncpipe.pipeline.pool_options import CONTROLLERS_ONLY, PoolOptions
from asyncpipe.pipeline.wire_messages import GroupValue
from asyncpipe.runtime.part_messages import Call, EdgeBroken, PartEnded, received
from asyncpipe.runtime.parts_driver import PartsDriver
from asyncpipe.runtime.workers.connection import WorkerConnection
from asyncpipe.runtime.workers.group import WorkerGroup
from asyncpipe.runtime.workers.launcher import Launcher, PlannedWorker
from asyncpipe.runtime.workers.process_launcher import ProcessLauncher
from asyncpipe.runtime.workers.ray_workers import RayWorkers
from asyncpipe.runtime.workers.torchrun_workers import TorchrunWorkers

__all__ = ["Workers", "assign_workers", "check_transport"]

ENTRY = "asyncpipe.pipeline.resident.serve:serve"
STARTS = 3
"""How often what is missing is started: a worker may be lost while others start, which takes seconds."""

_LAUNCHERS: Mapping[str, Callable[[], Launcher]] = {"ray": RayWorkers, "torchrun": TorchrunWorkers}


def assign_workers(devices: Sequence[Device], workers: str | Mapping[str, str] | Launcher) -> dict[str, str]:
    """The name of the worker of each device, by the device's name.

    By default, an accelerator has a worker, which has all logical devices on it; a logical CPU device has one of its
    own, since one process runs Python code for one thread at a time. Raises ``OptionError`` for a mapping that lacks
    a device, or names another one.
    """
    if isinstance(workers, Mapping):
        names = [device.name for device in devices]
        if missing := [name for name in names if name not in workers]:
            raise OptionError(f"workers names no worker for {', '.join(missing)}; name one for each of the devices")
        return {name: workers[name] for name in names}
    return {
        device.name: str(DeviceName(device.host, str(device.physical))) if device.is_accelerator else device.name
        for device in devices
    }


def check_transport(transport: str, devices: Sequence[Device], worker_of: Mapping[str, str]) -> None:
    """Raise ``OptionError`` if ``transport`` cannot carry tensors between the workers of these devices."""
    if transport == "nccl":
        owned: dict[str, set[DeviceName]] = {}
        for device in devices:
            owned.setdefault(worker_of[device.name], set()).add(DeviceName(device.host, str(device.physical)))
        owners: dict[DeviceName, str] = {}
        for worker, physical in owned.items():
            if len(physical) > 1 or any(each.is_cpu for each in physical):
                raise OptionError(
                    "transport='nccl' is for workers that have one CUDA device each, and worker "
                    f"{worker!r} has {', '.join(sorted(map(str, physical)))}; use 'shared_memory'"
                )
            (only,) = physical
            if (other := owners.setdefault(only, worker)) != worker:
                raise OptionError(
                    f"NCCL takes no two workers on one device, and {other!r} and {worker!r} share {only}; put it into "
                    "one worker, as workers='processes' does, or use transport='shared_memory'"
                )
        if not distributed.is_nccl_available():
            raise OptionError("this torch has no nccl; use transport='shared_memory'")


def _launcher(workers: str | Mapping[str, str] | Launcher) -> Launcher:
    if isinstance(workers, str | Mapping):
        return _LAUNCHERS.get(workers if isinstance(workers, str) else "processes", ProcessLauncher)()
    return workers


class Workers:
    """Used on the pool's loop, which is in a thread of its own."""

    def __init__(self, options: PoolOptions) -> None:
        self.driver = PartsDriver()
        """Runs the steps."""
        self.numbers: dict[str, int] = {}
        """By name of a worker, its number among the pool's."""
        self._pipelines = count()
        self._options = options
        self._group = WorkerGroup(
            _launcher(options.workers), ENTRY, received=self._received, lost=self._lost, path=options.worker_path
        )
        self._is_open = False
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By name, held while a worker starts: of two pipelines that need it, the second waits. Others do not."""
        self._connections: dict[str, WorkerConnection] = {}
        self._restarted: set[str] = set()
        """Those that took the place of lost ones, until a pipeline is loaded there."""
        self._under_way: set[asyncio.Task[None]] = set()
        self._owned: dict[str, tuple[str, ...]] = {}
        """The devices that each worker was started for."""

    def new_pipeline(self) -> int:
        """A number for one more pipeline."""
        return next(self._pipelines)

    @property
    def pool_options(self) -> bytes:
        """The options of a worker's own pool, for the worker."""
        values = {
            each.name: getattr(self._options, each.name)
            for each in fields(PoolOptions)
            if not each.metadata.get(CONTROLLERS_ONLY)
        }
        return to_wire(values, "policy")

    def worker_of(self, devices: Sequence[Device]) -> dict[str, str]:
        """As ``assign_workers``, by the pool's option."""
        return assign_workers(devices, self._options.workers)

    @property
    def transport(self) -> str:
        """How tensors get from one worker to another."""
        return self._options.transport

    @property
    def interface(self) -> str | None:
        """Where workers of other machines reach one."""
        return self._options.interface

    async def admit(self, devices: Sequence[Device]) -> None:
        """Start the workers of these devices that are missing, or were lost. They start at the same time."""
        owned: dict[str, tuple[str, ...]] = {}
        for device, name in self.worker_of(devices).items():
            before = owned.get(name, self._owned.get(name, ()))
            owned[name] = before if device in before else (*before, device)
        async with AsyncExitStack() as turns:
            # In one order, so that no two callers wait for each other.
            for name in sorted(owned):
                await turns.enter_async_context(self._turns[name])
            if not self._is_open:
                self._is_open = True
                await self._group.__aenter__()
            for _ in range(STARTS):
                if not (missing := [name for name in owned if name not in self.up]):
                    return
                for connection in await self._group.start(*missing, devices=owned):
                    if connection.name in self._connections:
                        self._restarted.add(connection.name)
                    self._connections[connection.name] = connection
                    self._owned[connection.name] = owned[connection.name]
                    self.numbers.setdefault(connection.name, len(self.numbers))

    @property
    def up(self) -> Mapping[str, WorkerConnection]:
        """Those that run, by name."""
        return self._group.workers

    def connection(self, worker: str) -> WorkerConnection:
        """The worker that has this name now. A pipeline stays with those that it was loaded into."""
        return self._connections[worker]

    def own_number(self, worker: str, device: Device) -> int:
        """The number of ``device`` in a worker that sees only its own accelerators. Raises ``OptionError`` if none."""
        seen, name = PlannedWorker("", self._owned[worker]).accelerators, DeviceName.parse(device.name).physical
        if name not in seen:
            raise OptionError(
                f"worker {worker!r} was started for {', '.join(seen)}, and sees no {name}; give this pipeline a pool "
                "of its own, or its worker another name"
            )
        return seen.index(name)

    def take_restarted(self, workers: Iterable[str]) -> set[str]:
        """Of these workers, those that have taken the place of lost ones. Each is told once."""
        found = self._restarted.intersection(workers)
        self._restarted -= found
        return found

    def begin(self, clearing: Coroutine[Any, Any, None]) -> None:
        """Clear something away that nobody waits for; it ends when the workers do."""
        task = asyncio.get_running_loop().create_task(clearing)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def aclose(self) -> None:
        """Stop all workers."""
        if self._is_open:
            await self._group.close()
        if self._under_way:
            await asyncio.wait(self._under_way)

    def kill(self) -> None:
        """Kill all workers without waiting; from any thread."""
        self._group.kill()

    def _received(self, worker: WorkerConnection, message: Any) -> None:
        if isinstance(message, EdgeBroken):
            self.driver.edge_broken(message.pipeline, message.error)
            return
        if isinstance(message, GroupValue):
            for name in message.members:
                if name != worker.name and name in self.up:
                    with suppress(WorkerLostError):
                        told = Call(message.pipeline, "put", (message.key, message.value))
                        self.up[name].send(told, urgent=True)
            return
        assert isinstance(message, PartEnded)
        if message.freed and worker.batches is not None:
            worker.batches.free(message.freed)
        self.driver.part_ended(worker.name, received(worker.name, message))

    def _lost(self, worker: WorkerConnection, error: WorkerLostError) -> None:
        self.driver.worker_lost(worker, error)
        for other in self.up.values():
            with suppress(WorkerLostError):
                other.send(Call(None, "member_lost", (worker.name,)))
