"""The processes of a service's jobs: start one, ask it for a run, and end it within a deadline.

::

    cancelled ─▶ asked to end between two tasks
                   │ ``cancel_seconds`` later
                   ▼
                 told to end: it writes down what its threads do, and ends with its children
                   │ ``TERMINATE_SECONDS`` later, since a thread holds the GIL for ever, or the process is stopped
                   ▼
                 killed, with its children

In the end it is gone, with all memory that it had, and only then its place is free.
"""

from __future__ import annotations

import asyncio
import logging
import os
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
from asyncpipe.service.jobs.isolation.messages import CancelRun, Confines, Terminate
from asyncpipe.service.jobs.run_outcome import EndedElsewhereError, RunEnding, RunOutcome
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.train.job_file import Job
from asyncpipe.train.workload import Workload

__all__ = ["JobProcess", "JobProcesses", "confines_of", "pickled"]

_logger = logging.getLogger(__name__)

ENTRY = "asyncpipe.service.jobs.isolation.job_process:serve"
TERMINATE_SECONDS = 2.0
"""For a process that was told to end, before it is killed."""
STOP_SECONDS = 3.0
"""For a process whose run is over to end by itself, before it is killed."""

_MEMORY_SIGNALS = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)

Take = Callable[[Any], object]
Note = Callable[[int, str], object]


class JobProcess:
    """A process that is up, and asked for one thing."""

    def __init__(self, connection: WorkerConnection, settings: ServiceSettings, note: Note) -> None:
        """``note`` is called with a level and a text for people."""
        self.pid = connection.pid
        self._connection = connection
        self._cancel_seconds = settings.cancel_seconds
        self._memory = settings.job_memory
        self._note = note

    def send(self, message: object) -> None:
        """Send ``message``, unless the process is gone."""
        with suppress(WorkerLostError):
            self._connection.send(message)

    async def ask(self, message: object) -> Any:
        """The answer, as ``WorkerConnection.ask``."""
        return await self._connection.ask(message)

    async def have_done(self, message: object) -> Any:
        """The answer to ``message``, which may take as long as a run. A cancellation ends the process in time.

        Raises ``EndedElsewhereError``, also where the process is gone before it has answered.
        """
        asked = asyncio.ensure_future(self._connection.ask(message))
        try:
            await asyncio.wait([asked])
        except asyncio.CancelledError:
            await wait_uncancelled(asyncio.ensure_future(self._end_early(asked)))
            error = asked.exception()
            if error is not None:
                raise
        try:
            return asked.result()
        except WorkerLostError as error:
            raise EndedElsewhereError(RunOutcome(RunEnding.CRASHED, _how_it_ended(error, self._memory))) from error

    async def _end_early(self, asked: asyncio.Future[Any]) -> None:
        """Return when ``asked`` is done."""
        self.send(CancelRun())
        await asyncio.wait([asked], timeout=self._cancel_seconds)
        if asked.done():
            return
        self._note(
            logging.WARNING,
            f"it has not ended within {self._cancel_seconds:g} s of being asked, so its process is terminated",
        )
        told = asyncio.ensure_future(self._connection.query(Terminate()))
        told.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([asked], timeout=TERMINATE_SECONDS)
        if not asked.done():
            self._note(logging.WARNING, f"nor within {TERMINATE_SECONDS:g} s of being told to, so it is killed")
            # It has not ended, so its group is still its own.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._connection.kill("it did not end when it was told to")
            await asyncio.wait([asked])

    async def end(self) -> None:
        """Have the process end, and return when it is gone."""
        await self._connection.stop()


class JobProcesses:
    """Starts the processes of jobs, inside ``async with``; of the loop that opens it."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self.worker_path = () if settings.entry_path is None else (str(settings.entry_path.resolve()),)
        self._taken = _Inboxes()
        # One whose threads cannot run, since one holds the GIL, is as good as one with a task that hangs.
        limits = WorkerLimits(silent=settings.watchdog_floor, stop=STOP_SECONDS)
        self._group = WorkerGroup(
            ProcessLauncher(), ENTRY, received=self._taken.take, limits=limits, path=self.worker_path
        )

    async def __aenter__(self) -> JobProcesses:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._group.close()

    @asynccontextmanager
    async def process(self, name: str, take: Take, note: Note) -> AsyncIterator[JobProcess]:
        """A process that is listed as ``name``, up within the block and gone behind it.

        ``take`` is called with what it says unasked. Raises ``EndedElsewhereError`` if it cannot be started.
        """
        self._taken.by_name[name] = take
        try:
            try:
                (connection,) = await self._group.start(name)
            except WorkerStartError as error:
                raise EndedElsewhereError(RunOutcome(RunEnding.CRASHED, f"its process {error.how}")) from error
            process = JobProcess(connection, self.settings, note)
            try:
                yield process
            finally:
                await wait_uncancelled(asyncio.ensure_future(process.end()))
        finally:
            del self._taken.by_name[name]


class _Inboxes:
    """Gives what processes say to who waits for it. Held by the group's thread, so it does not hold the group."""

    def __init__(self) -> None:
        self.by_name: dict[str, Take] = {}

    def take(self, connection: WorkerConnection, message: object) -> None:
        if (take := self.by_name.get(connection.name)) is not None:
            take(message)


def confines_of(settings: ServiceSettings, job: Job, *, is_background: bool) -> Confines:
    """What the settings allow the process of ``job``."""
    limits = settings.memory_limit
    used = {device: limits[device] for device in job.pipeline.devices if device in limits}
    return Confines(len(settings.devices), settings.job_memory, used, is_background)


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


def _how_it_ended(error: WorkerLostError, memory: int | None) -> str:
    """What became of a process, and what usually does that."""
    hint = ""
    if error.exit_status == -signal.SIGKILL and "SIGKILL" in error.how:
        hint = ", as by the OOM killer"
    elif error.exit_status in _MEMORY_SIGNALS and memory is not None:
        hint = f", as where code gets no more memory; it may have {format_bytes(memory)} (job_memory)"
    return f"its process {error.how}{hint}"
