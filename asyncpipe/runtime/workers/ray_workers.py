"""Workers on the machines of a Ray cluster. Ray starts, places and watches them; it carries nothing that they say.

::

    controller            Ray's driver ── actor ── agent ── worker
        ║                        ║                    ║        ║
        ╚════════ control connections, TCP ═══════════╩════════╝
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

from asyncpipe.core.checks import check_choice, check_positive
from asyncpipe.errors import (
    LauncherError,
    OptionError,
    PipelineClosedError,
    WorkerLostError,
    WorkerStartError,
    missing_package,
)
from asyncpipe.runtime.portal import PortalCall, whole
from asyncpipe.runtime.waits import drive
from asyncpipe.runtime.workers.agents import AgentProcess, Agents, FarProcess, Seat, by_host, shared_out
from asyncpipe.runtime.workers.child_process import PROGRAM
from asyncpipe.runtime.workers.connection import WorkerConnection
from asyncpipe.runtime.workers.group import WorkerGroup
from asyncpipe.runtime.workers.held_folder import HeldFolder
from asyncpipe.runtime.workers.launcher import Invitation, PlannedWorker
from asyncpipe.runtime.workers.place import address_of_interface
from asyncpipe.runtime.workers.process_launcher import ProcessLauncher
from asyncpipe.runtime.workers.supervisor import WorkerLimits

__all__ = ["RayWorkers"]

OBJECT_STORE_BYTES = 80 << 20
"""Of a cluster of our own. Ray wants 75 MiB at least, and nothing is put there."""
OWN_RESOURCE = "asyncpipe"
"""What workers take of a cluster of our own, which has no end of it: nobody else asks for CPUs there."""
DRIVER = "asyncpipe.worker.ray_driver:serve"
END_SECONDS = 20.0
"""For Ray to shut down."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Otherwise Ray warns of what it will do one day.
    "RAY_DEDUP_LOGS": "0",
}
LONGEST_FOLDER = 40
"""Letters. Ray makes paths of Unix sockets of it, which may have 107."""

_logger = logging.getLogger(__name__)


class RayWorkers:
    """Workers on a Ray cluster: ``DevicePool(workers=RayWorkers(address="10.0.0.5:6379"))``. For one pool.

    Without an address Ray starts on this machine, for this pool alone, and ends with it. Needs the extra ``ray``, which
    is imported in a process of its own, when the first worker starts.

    ``placement="host"`` reserves one bundle a host. Hosts are those that devices name (``host-a/cuda:0``): machines of
    the cluster by name, host name or address, or, if none of them is one, names that the job gives to machines which
    Ray chooses, each another one. Devices without a host are shared out over ``hosts`` machines, neighbours together;
    by default over all. ``placement="device"`` reserves one bundle for each worker, wherever Ray finds room. A worker
    takes ``cpus`` of the cluster, and a GPU if its device is one: it sees the GPU that Ray gave it, whatever the number
    in the device's name. ``resources`` are added to each bundle, by Ray's names.

    ``placement_group`` is one that is there (its name, its id, or Ray's object): nothing is reserved then. Workers take
    bundles of it as they are, and it stays when they end.

    ``interface`` is where workers connect to this machine (``"eth0"``, an address or a network of it); needed where the
    cluster has others.
    ``environment`` is added to that of workers. ``seconds`` is how long to wait for room, and for an agent that was
    lost to be there again. ``options`` go to ``ray.init``: ``{"runtime_env": {...}}``, for instance. Ray lists what is
    started and reserved here as ``asyncpipe/NAME/…``; ``name`` is by default that of this program.
    """

    def __init__(
        self,
        address: str = "local",
        *,
        placement: Literal["host", "device"] = "host",
        hosts: int | None = None,
        cpus: float = 1.0,
        resources: Mapping[str, float] | None = None,
        placement_group: Any = None,
        interface: str | None = None,
        environment: Mapping[str, str] | None = None,
        seconds: float = 60.0,
        options: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        check_choice("placement", placement, ("host", "device"))
        if hosts is not None:
            check_positive("hosts", hosts)
        if not address or cpus < 0 or seconds <= 0:
            raise OptionError("RayWorkers takes an address that is not empty, cpus >= 0 and seconds > 0")
        if placement == "device" and hosts is not None:
            raise OptionError("placement='device' lets Ray choose the hosts; leave hosts out, or use 'host'")
        if placement_group is not None and address == "local":
            raise OptionError("a placement_group is one of a cluster that runs: give RayWorkers its address")
        self._address = address
        self._placement = placement
        self._hosts = hosts
        self._cpus = cpus
        self._resources = dict(resources or {})
        self._interface = interface
        self._seconds = seconds
        self._options = dict(options or {})
        self._name = name or Path(sys.argv[0]).stem or "python"
        self._given = placement_group if isinstance(placement_group, str | None) else placement_group.id.hex()
        self._unused: dict[int, Mapping[str, float]] | None = None
        """Of the placement group that was given: what its bundles have that nobody has been placed in."""
        self._reserved: list[Mapping[str, Mapping[str, float]]] = []
        """What a driver of Ray's has reserved, or the one in its place has to reserve again: bundles by name."""
        self._actors = _Actors()
        self._agents = Agents(self._actors, environment, seconds)
        self._nodes: list[dict[str, str]] = []
        self._folder: HeldFolder | None = None
        self._turn = asyncio.Lock()

    async def prepare(self, workers: Sequence[PlannedWorker]) -> tuple[str, int] | None:
        """Reserve bundles for those that have none, all at once. In the place of a lost driver of Ray's starts another.

        What the lost one had reserved is reserved again, so agents start again where they were.
        """
        async with self._turn:
            ray = self._actors.ray
            if ray is None or ray.lost:
                ray = self._actors.ray = await self._open(ray)
            if new := [worker for worker in workers if worker.name not in self._agents.seats]:
                await self._reserve(ray, new)
        return self._actors.address

    async def start(self, invitation: Invitation) -> AgentProcess:
        """Have the agent of its bundle start it, which starts before if it is not there."""
        return await self._agents.start(invitation)

    async def close(self) -> None:
        """End the agents, give back the bundles, and end Ray if it was started here."""
        await self._agents.close()
        ray, self._actors.ray = self._actors.ray, None
        if ray is not None:
            await ray.close()
        if self._folder is not None:
            self._folder.remove()

    async def _open(self, before: RayDriver | None) -> RayDriver:
        """A driver that is connected, and has reserved what the one ``before`` it had."""
        if importlib.util.find_spec("ray") is None:
            raise missing_package("workers='ray' needs Ray", "ray")
        if before is not None:
            await before.close()
        wrong = "Ray cannot start" if self._address == "local" else f"Ray cannot be reached at {self._address!r}"
        options, environment = dict(self._options), dict(QUIET)
        if self._address == "local":
            options = {
                "num_cpus": 1,
                "resources": {OWN_RESOURCE: 1e6},
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_temp_dir": self._temporary(),
            } | options
            # Otherwise Ray writes one into the user's home, and every cluster that starts there later asks for it.
            environment["RAY_AUTH_TOKEN"] = secrets.token_hex()
        ray = RayDriver(self._name, environment)
        try:
            found = await ray.ask("open", name=self._name, address=self._address, options=options)
            self._nodes = found["nodes"]
            if self._given is not None:
                wrong = f"Ray's placement group {self._given!r} cannot be used"
                bundles = await ray.ask("find", group=self._given, seconds=self._seconds)
                self._unused = dict(enumerate(bundles)) if self._unused is None else self._unused
                self._nodes = [each for each in self._nodes if any(f"node:{each['address']}" in has for has in bundles)]
            self._actors.address = self._own_address(found["here"])
            for asked in self._reserved:
                wrong = "Ray's driver cannot be started again"
                await self._room(ray, asked)
        except BaseException as error:
            await ray.close()
            if isinstance(error, LauncherError):
                raise LauncherError(f"{wrong}: {error}") from None
            raise
        if before is not None:
            _logger.warning("the %s; it was started again, and its agents start with it", before.lost)
        return ray

    def _temporary(self) -> str:
        if len(tempfile.gettempdir()) > LONGEST_FOLDER:
            return "/tmp/ray"  # noqa: S108 - where Ray puts its files by itself
        self._folder = self._folder or HeldFolder("asyncpipe-ray-")
        return self._folder.path

    def _own_address(self, here: str) -> tuple[str, int] | None:
        if self._interface is not None:
            return address_of_interface(self._interface), 0
        others = sorted({node["address"] for node in self._nodes} - {here})
        if others:
            raise OptionError(
                f"the cluster has other machines ({', '.join(others)}), whose workers connect to this one: give "
                f"RayWorkers(interface=...) the address at which they reach it; Ray knows it as {here}"
            )
        return None

    async def _reserve(self, ray: RayDriver, workers: Sequence[PlannedWorker]) -> None:
        groups = self._groups(workers)
        needs = {name: self._needs(members) for name, members in groups.items()}
        pinned = self._pinned([name for name in groups if self._placement == "host"])
        asked = {name: {**bundle, **pinned.get(name, {})} for name, bundle in needs.items()}
        number, bundles = 0, self._taken(asked)
        if self._given is None:
            number = await self._room(ray, asked)
            self._reserved.append(asked)
        for (name, members), bundle in zip(groups.items(), bundles, strict=True):
            agent = f"agent {len(self._actors.places)} of {name}"
            self._actors.places[agent] = _BundleOfAgent(number, bundle, needs[name])
            gpus = [(worker.name, each) for worker in members for each in worker.accelerators]
            for worker in members:
                own = tuple([place for place, (owner, _) in enumerate(gpus) if owner == worker.name])
                self._agents.seats[worker.name] = Seat(agent, own)

    async def _room(self, ray: RayDriver, asked: Mapping[str, Mapping[str, float]]) -> int:
        """Reserve these bundles; the number of their group."""
        strategy = "STRICT_SPREAD" if self._placement == "host" else "PACK"
        try:
            return int(await ray.ask("reserve", bundles=list(asked.values()), strategy=strategy, seconds=self._seconds))
        except LauncherError as error:
            each = "of its own machine " * (self._placement == "host")
            listed = "; ".join(f"{name}: {bundle}" for name, bundle in asked.items())
            raise LauncherError(
                f"the cluster has had no room for {len(asked)} bundles {each}within {self._seconds:g} s ({listed}): "
                f"{error}"
            ) from None

    def _taken(self, asked: Mapping[str, Mapping[str, float]]) -> list[int]:
        """The numbers of the bundles that these get: each the smallest that is enough, of a group that was given."""
        if self._unused is None:
            return list(range(len(asked)))
        unused, taken = dict(self._unused), []
        for name, needs in asked.items():
            enough = [number for number, has in unused.items() if all(has.get(key, 0.0) >= needs[key] for key in needs)]
            if not enough:
                raise LauncherError(
                    f"Ray's placement group {self._given!r} has no bundle left for {name}, which needs {needs}; unused "
                    f"are {list(unused.values())}"
                )
            taken.append(min(enough, key=lambda number: sum(unused[number].values())))
            del unused[taken[-1]]
        self._unused = unused
        return taken

    def _groups(self, workers: Sequence[PlannedWorker]) -> dict[str, list[PlannedWorker]]:
        """The workers of each bundle, by host or by worker."""
        named = by_host(workers)
        if self._placement == "device":
            if first := next((worker for worker in workers if worker.hosts), None):
                raise OptionError(
                    f"{first.devices[0]!r} names a host, and with placement='device' Ray chooses it; use 'host'"
                )
            return {worker.name: [worker] for worker in workers}
        if "" not in named:
            return named
        places = min(self._hosts or len(self._nodes), len(workers))
        by_name = {worker.name: worker for worker in workers}
        shares = shared_out(list(by_name), places)
        return {f"host {place}": [by_name[name] for name in names] for place, names in enumerate(shares)}

    def _needs(self, workers: Sequence[PlannedWorker]) -> dict[str, float]:
        """What a bundle has to have."""
        gpus = sum(len(worker.accelerators) for worker in workers)
        cpus = {OWN_RESOURCE: float(len(workers))} if self._address == "local" else {"CPU": self._cpus * len(workers)}
        asked = {**cpus, "GPU": float(gpus), **self._resources}
        return {name: amount for name, amount in asked.items() if amount}

    def _pinned(self, hosts: Sequence[str]) -> dict[str, dict[str, float]]:
        """What keeps the bundles of hosts on the machines of that name, if the names are those of machines."""
        machines = {
            host: node["address"]
            for host in hosts
            for node in self._nodes
            if host in (node["name"], node["hostname"], node["address"])
        }
        if machines and (unknown := [host for host in hosts if host not in machines]):
            there = sorted({node[key] for node in self._nodes for key in ("name", "hostname")})
            raise OptionError(f"the cluster has no host {', '.join(unknown)}; it has {', '.join(there)}")
        return {host: {f"node:{address}": 0.001} for host, address in machines.items()}


class _BundleOfAgent(NamedTuple):
    """Where an agent is."""

    group: int
    bundle: int
    needs: Mapping[str, float]


class _Actors:
    """A launcher of agents, as actors."""

    def __init__(self) -> None:
        self.ray: RayDriver | None = None
        self.address: tuple[str, int] | None = None
        self.places: dict[str, _BundleOfAgent] = {}

    async def prepare(self, workers: Sequence[PlannedWorker]) -> tuple[str, int] | None:
        return self.address

    async def start(self, invitation: Invitation) -> _ActorProcess:
        assert self.ray is not None
        return _ActorProcess(self.ray, self.places[invitation.name], invitation)

    async def close(self) -> None:
        """Ray itself ends when its agents have."""


class RayDriver:
    """The process that Ray's driver is in: a worker of a group of its own (``asyncpipe/worker/ray_driver.py``)."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self._group = WorkerGroup(ProcessLauncher(environment), DRIVER, limits=WorkerLimits(stop=END_SECONDS))
        self._loop = asyncio.get_running_loop()
        self._name = f"Ray driver of {name}"
        self._worker: WorkerConnection | None = None

    @property
    def lost(self) -> str | None:
        """Which it is, and what became of it, if it is lost."""
        if self._worker is None or self._worker.lost is None:
            return None
        return f"{self._name} (process {self._worker.pid}) {self._worker.lost.how}"

    async def ask(self, do: str, **arguments: Any) -> Any:
        """The answer to a command. Raises ``LauncherError`` where Ray fails, or where this process is lost.

        On any loop: agents are workers of another group, which has one of its own.
        """
        call = PortalCall(self._loop, self._ask(do, arguments))
        call.start()
        return await drive(whole(call))

    async def _ask(self, do: str, arguments: dict[str, Any]) -> Any:
        try:
            if self._worker is None:
                await self._group.__aenter__()
                (self._worker,) = await self._group.start(self._name)
            return await self._worker.ask((do, arguments))
        except (WorkerLostError, WorkerStartError) as error:
            raise LauncherError(str(error)) from None

    async def close(self) -> None:
        """Have it end what it has started; a process that does not end is killed."""
        await self._group.close()


class _ActorProcess(FarProcess):
    """An agent in an actor."""

    _numbers = count()

    def __init__(self, ray: RayDriver, place: _BundleOfAgent, invitation: Invitation) -> None:
        super().__init__(self._tell)
        self._ray = ray
        self._number = next(self._numbers)
        self._under_way = {self._loop.create_task(self._run(place, invitation))}

    async def _run(self, place: _BundleOfAgent, invitation: Invitation) -> None:
        try:
            ended = await self._ray.ask(
                "start",
                number=self._number,
                name=invitation.name,
                group=place.group,
                bundle=place.bundle,
                needs=place.needs,
                line=invitation.line().decode(),
                program=str(PROGRAM),
                environment={name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
            )
            self.end(*ended)
        except LauncherError as error:  # Ray has lost it, or could not start it.
            self.end(None, str(error))

    def _tell(self, stacks: bool) -> None:
        if not stacks:  # Those of an agent that hangs are of no interest.
            self._under_way.add(self._loop.create_task(self._kill()))

    async def _kill(self) -> None:
        with suppress(LauncherError, PipelineClosedError):
            await self._ray.ask("kill", number=self._number)
