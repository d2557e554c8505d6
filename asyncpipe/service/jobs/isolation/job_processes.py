"""The processes of a service's jobs. One that has ended is gone with all that it had, and only then its place is free.

Where two of them have a device in common, one more process decides whose turn it is (``arbitration.py``).

A process leads a group. What reaps it kills the rest of the group first, and the kernel kills the whole group when the
service is gone (``runtime/workers/lifeline.py``).
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from asyncpipe.core.predict.memory import format_bytes
from asyncpipe.errors import OptionError, WorkerLostError, WorkerStartError
from asyncpipe.runtime.portal import wait_uncancelled
from asyncpipe.runtime.workers.connection import WorkerConnection
from asyncpipe.runtime.workers.group import WorkerGroup
from asyncpipe.runtime.workers.process_launcher import ProcessLauncher
from asyncpipe.runtime.workers.supervisor import WorkerLimits
from asyncpipe.service.jobs.isolation.arbitration import ENTRY as ARBITER
from asyncpipe.service.jobs.isolation.messages import Confines
from asyncpipe.service.jobs.run_outcome import EndedElsewhereError, RunEnding, RunOutcome
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.train.job_file import Job
from asyncpipe.train.workload import Workload

__all__ = ["JobProcesses", "confines_of", "crash", "pickled"]

ENTRY = "asyncpipe.service.jobs.isolation.job_process:serve"
START_SECONDS = 5.0
"""Between two attempts to start the arbiter."""
STOP_SECONDS = 3.0
"""For a process whose run is over to end by itself, before it is killed."""

_logger = logging.getLogger(__name__)

_MEMORY_SIGNALS = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)

Take = Callable[[Any], object]


class JobProcesses:
    """Starts the processes of jobs, inside ``async with``; of the loop that opens it."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self.worker_path = () if settings.entry_path is None else (str(settings.entry_path.resolve()),)
        self._inboxes: dict[str, Take] = {}
        self._devices: dict[WorkerConnection, tuple[str, ...]] = {}
        """Of the processes that train on devices."""
        self._arbiter: WorkerConnection | None = None
        """While it is up."""
        self._keeping: asyncio.Task[None] | None = None
        # One whose threads cannot run, since one holds the GIL, is as good as one with a task that hangs.
        limits = WorkerLimits(silent=settings.watchdog_floor, stop=STOP_SECONDS)
        received = _received_by(self._inboxes)
        self._group = WorkerGroup(ProcessLauncher(), ENTRY, received=received, limits=limits, path=self.worker_path)

    async def __aenter__(self) -> JobProcesses:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        await self._group.close()

    @asynccontextmanager
    async def process(self, name: str, take: Take) -> AsyncIterator[WorkerConnection]:
        """A process that is listed as ``name``, up within the block and gone behind it.

        ``take`` is called with what it says unasked. Raises ``EndedElsewhereError`` if it cannot be started.
        """
        self._inboxes[name] = take
        try:
            try:
                (connection,) = await self._group.start(name)
            except WorkerStartError as error:
                raise EndedElsewhereError(RunOutcome(RunEnding.CRASHED, f"its process {error.how}")) from error
            try:
                yield connection
            finally:
                self._devices.pop(connection, None)
                await wait_uncancelled(asyncio.ensure_future(connection.stop()))
        finally:
            del self._inboxes[name]

    def share(self, process: WorkerConnection, devices: tuple[str, ...]) -> None:
        """Have ``process`` take turns with others on those of ``devices`` that these have, too; from now on."""
        others = {device for each in self._devices.values() for device in each}
        self._devices[process] = devices
        if self._arbiter is not None:
            self._introduce(self._arbiter, process)
        elif self._keeping is None and not others.isdisjoint(devices):
            self._keeping = asyncio.create_task(self._keep_arbiter(), name="asyncpipe arbiter")

    async def _keep_arbiter(self) -> None:
        """Have an arbiter, for all processes that there are; start another one where one has ended."""
        while True:
            try:
                (arbiter,) = await self._group.start("arbiter of jobs", entry=ARBITER)
            except WorkerStartError as error:
                _logger.error("jobs share devices without regard to their weights: %s", error)
                await asyncio.sleep(START_SECONDS)
                continue
            self._arbiter = arbiter
            for process in self._devices:
                self._introduce(arbiter, process)
            await arbiter.ended.wait()
            self._arbiter = None

    def _introduce(self, arbiter: WorkerConnection, process: WorkerConnection) -> None:
        asked = asyncio.ensure_future(arbiter.ask(self._devices[process]))

        def tell(address: asyncio.Future[Any]) -> None:
            if not address.cancelled() and address.exception() is None:
                with suppress(WorkerLostError):
                    process.send(address.result())

        asked.add_done_callback(tell)


def _received_by(inboxes: dict[str, Take]) -> Callable[[WorkerConnection, Any], None]:
    """Gives what processes say to who waits for it. Held by the group's thread, so it does not hold the group."""

    def received(connection: WorkerConnection, message: Any) -> None:
        if (take := inboxes.get(connection.name)) is not None:
            take(message)

    return received


def confines_of(settings: ServiceSettings, job: Job) -> Confines:
    """What the settings allow the process of ``job``."""
    limits = settings.memory_limit
    used = {device: limits[device] for device in job.pipeline.devices if device in limits}
    return Confines(len(settings.devices), settings.job_memory, used)


def pickled(make_workload: Callable[[], Workload]) -> bytes:
    """``make_workload`` for another process: a module's factory by its name, a script's own by value.

    Raises ``OptionError`` for what cannot be pickled.
    """
    try:
        made: bytes = cloudpickle.dumps(make_workload)
    except Exception as error:  # A class's own methods run here.
        raise OptionError(
            f"a job in a process of its own needs an entry that can be pickled, with its arguments "
            f'({type(error).__name__}: {error}); or run jobs on threads, isolation = "thread"'
        ) from error
    return made


def crash(error: WorkerLostError, memory: int | None) -> EndedElsewhereError:
    """How the run ended whose process is lost, with what usually does that; the process may have had ``memory``."""
    hint = ""
    if error.exit_status == -signal.SIGKILL and "SIGKILL" in error.how:
        hint = ", as by the OOM killer"
    elif error.exit_status in _MEMORY_SIGNALS and memory is not None:
        hint = f", as where code gets no more memory; it may have {format_bytes(memory)} (job_memory)"
    return EndedElsewhereError(RunOutcome(RunEnding.CRASHED, f"its process {error.how}{hint}"))
