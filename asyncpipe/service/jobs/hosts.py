"""The workers of a service and their hosts: what each one does, and which hosts jobs are to leave.

::

    drain host-a ───▶ runs with devices there end their step, take a snapshot, and go on elsewhere
                      (train/lasting_run.py); jobs that begin later do without it
    undrain host-a ─▶ those runs take it in again, in the same way

A host is drained until it is undrained, or the service ends. A worker whose device names no host is one by itself.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from asyncpipe.core.hosts import unit_of
from asyncpipe.core.records.worker_notes import WorkerChange, WorkerState
from asyncpipe.errors import AsyncpipeError
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.train.drained_hosts import DrainedHosts

__all__ = ["Hosts", "UnknownHostError", "WorkerStatus"]

_logger = logging.getLogger(__name__)


class UnknownHostError(AsyncpipeError, LookupError):
    """The service has no such host; the message names those that it has."""

    def __init__(self, host: str, known: Sequence[str]) -> None:
        super().__init__(f"there is no host {host!r}; the service has {', '.join(known) or 'no workers'}")
        self.host = host
        self.known = tuple(known)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker of the service."""

    name: str
    host: str
    """What is drained, and lost, with it: the host in its name, or it alone."""
    up: bool
    """Whether its process runs. Workers start when the first job needs them, and again when they were lost."""
    draining: bool
    """Whether jobs are to leave it."""
    machine: str
    """The name of the machine that it runs on; empty if it does not."""
    pid: int
    heartbeat_seconds: float | None
    """Since something came from it, which is asked every half second; ``None`` if it is not up."""
    round_trip_seconds: float | None
    devices: tuple[str, ...]
    jobs: tuple[str, ...]
    """The running jobs that have stages there."""


class Hosts(DrainedHosts):
    """The hosts of a service's pool; of the service's loop. Runs ask it which are drained."""

    def __init__(
        self, pool: DevicePool, devices: Sequence[str], jobs_in: Callable[[], Mapping[str, Sequence[str]]]
    ) -> None:
        """``devices`` are the service's. ``jobs_in`` returns the workers of each running job."""
        super().__init__(devices)
        self._pool = pool
        self._jobs_in = jobs_in
        self._of_jobs: dict[tuple[str, str], int] = {}
        """By job and worker: the processes that jobs in processes of their own have started, and that are up."""

    @property
    def leaving(self) -> frozenset[str]:
        """The devices of all hosts that are drained, by their names among the service's."""
        gone = (devices for worker, devices in self._named().items() if unit_of(worker) in self)
        return frozenset(device.partition("#")[0] for devices in gone for device in devices)

    async def drain(self, host: str) -> Sequence[WorkerStatus]:
        """Have jobs leave ``host`` after their steps; its workers. Raises ``UnknownHostError``."""
        return await self._change(host, self.units | {host})

    async def undrain(self, host: str) -> Sequence[WorkerStatus]:
        """Have jobs use ``host`` again; its workers. Raises ``UnknownHostError``."""
        return await self._change(host, self.units - {host})

    async def _change(self, host: str, units: frozenset[str]) -> Sequence[WorkerStatus]:
        known = sorted({unit_of(name) for name in self._named()})
        if host not in known:
            raise UnknownHostError(host, known)
        if units != self.units:
            how = "used again" if host in self else "drained: jobs leave it after their steps"
            _logger.info("host %s is %s", host, how)
            self.set(units)
        return [each for each in await self.workers() if each.host == host]

    def tell(self, job: str, change: WorkerChange) -> None:
        """A worker came up or was lost that ``job``, in a process of its own, has for itself."""
        if change.state is WorkerState.UP:
            self._of_jobs[job, change.worker] = change.pid
        else:
            self._of_jobs.pop((job, change.worker), None)

    def forget(self, job: str) -> None:
        """The process of ``job`` is gone, and its workers with it."""
        for key in [each for each in self._of_jobs if each[0] == job]:
            del self._of_jobs[key]

    async def workers(self) -> Sequence[WorkerStatus]:
        """All workers, those that are not up as well; empty if the service's devices are threads."""
        workers = self._pool.workers
        if workers is None:
            return []
        jobs_in = self._jobs_in()

        async def look() -> list[WorkerStatus]:
            # On the pool's loop, where they come and go.
            named = self._named()
            up = dict(workers.up)
            return [
                WorkerStatus(
                    name=name,
                    host=unit_of(name),
                    up=name in up,
                    draining=unit_of(name) in self,
                    machine=up[name].place.host if name in up else "",
                    pid=up[name].pid if name in up else 0,
                    heartbeat_seconds=_finite(up[name].silent_seconds) if name in up else None,
                    round_trip_seconds=_finite(up[name].round_trip) if name in up else None,
                    devices=tuple(named.get(name, [name])),
                    jobs=tuple(job for job, used in jobs_in.items() if name in used),
                )
                for name in dict.fromkeys([*named, *up])
            ]

        return [self._as_told(each) for each in await self._pool.run(look())]

    def _as_told(self, status: WorkerStatus) -> WorkerStatus:
        """``status`` with what a job's process tells of its own; of several, the first."""
        pids = [pid for (_, worker), pid in self._of_jobs.items() if worker == status.name]
        return replace(status, up=True, pid=pids[0], machine=platform.node()) if pids and not status.up else status

    def heartbeats(self) -> dict[str, float]:
        """By worker that is up, the seconds since something came from it. From any thread."""
        workers = self._pool.workers
        if workers is None:
            return {}
        ages = {name: connection.silent_seconds for name, connection in list(workers.up.items())}
        return {name: age for name, age in ages.items() if isfinite(age)}

    def drained(self) -> dict[str, bool]:
        """By host, whether it is drained. From any thread."""
        return {host: host in self for host in sorted({unit_of(name) for name in self._named()})}

    def _named(self) -> dict[str, list[str]]:
        """The devices of each worker that the service's devices have."""
        workers = self._pool.workers
        if workers is None:
            return {}
        named: dict[str, list[str]] = {}
        for device, worker in workers.worker_of(self._pool.resolve(self.others)).items():
            named.setdefault(worker, []).append(device)
        return named


def _finite(seconds: float) -> float | None:
    return seconds if isfinite(seconds) else None
