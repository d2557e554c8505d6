"""The memory of queued jobs, measured one after the other before they start: on a thread, or in a process of its own.

::

    the first of the queue ─▶ its entry makes the model ─▶ a few steps of copies ─▶ peaks, by which the queue decides
                                       │
                                       └─▶ it fails, hangs, or takes its process along: as a run of the job would
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Protocol

from asyncpipe.service.job_states import JobRecord, JobState
from asyncpipe.service.jobs.active_jobs import ActiveJobs
from asyncpipe.service.jobs.isolation.job_processes import JobProcesses
from asyncpipe.service.jobs.memory_footprint import footprint
from asyncpipe.service.jobs.run_outcome import EndedElsewhereError, RunEnding, RunOutcome, is_permanent
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.store.job_store import StoreError
from asyncpipe.train.blocking_calls import DedicatedThread
from asyncpipe.train.job_file import Job
from asyncpipe.train.randomness import RunRandom
from asyncpipe.train.workload import Workload

__all__ = ["Measure", "MemoryMeasuring", "StartsJobs", "retries_of"]

_logger = logging.getLogger(__name__)

Measure = Callable[..., Mapping[str, int]]


class StartsJobs(Protocol):
    """What the manager is to the measuring."""

    settings: ServiceSettings
    jobs: ActiveJobs
    processes: JobProcesses | None
    failures: dict[str, int]
    shutdown: str | None
    ending: asyncio.Event

    def built(self, record: JobRecord) -> tuple[Job, Callable[[], Workload]]: ...
    async def refuse(self, record: JobRecord, cause: str, to: JobState = JobState.FAILED) -> None: ...
    async def back_off(self, failures: int) -> None: ...


class MemoryMeasuring:
    """Measures one job at a time. Of the manager's loop."""

    def __init__(self, manager: StartsJobs, measure: Measure | None) -> None:
        """``measure`` takes the place of ``footprint``, in a thread; for tests."""
        self.peaks: dict[str, Mapping[str, int]] = {}
        """The measured memory by device, of jobs that have not ended."""
        self._manager = manager
        self._measure = measure
        self._task: asyncio.Task[None] | None = None

    def begin(self, record: JobRecord) -> None:
        """Measure the job of ``record``, unless one is being measured; the queue is looked at again at the end."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(record), name=f"asyncpipe footprint of {record.id}")

    async def ended(self) -> None:
        """Return when nothing is measured."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self, record: JobRecord) -> None:
        """Find the job's peak memory, or let the job fail."""
        manager = self._manager
        try:
            job, make_workload = manager.built(record)
            peaks = await self._measured(job, make_workload, record)
            if record.id in manager.jobs.queued:
                self.peaks[record.id] = peaks
        except _Obsolete:
            pass
        except Exception as error:  # noqa: BLE001 - logged, and the cause of the transition
            if isinstance(error, EndedElsewhereError) and error.outcome.ending is RunEnding.CRASHED:
                await self._crashed(record, error.outcome)
            else:
                await self._failed(record, error)
        finally:
            self._task = None
            manager.jobs.changed.set()

    async def _failed(self, record: JobRecord, error: Exception) -> None:
        manager = self._manager
        failures = manager.failures.get(record.id, 0) + 1
        if record.id in manager.jobs.queued:
            manager.failures[record.id] = failures
        cause = f"its memory could not be measured: {error}"
        _logger.warning("job %s: %s", record.id, cause)
        if is_permanent(error) or failures > retries_of(record):
            with suppress(StoreError):  # The job stays queued and is measured again.
                await manager.refuse(record, cause)
        else:
            await manager.back_off(failures)

    async def _crashed(self, record: JobRecord, outcome: RunOutcome) -> None:
        """The process is gone in which it was measured: that counts as an attempt."""
        crashes, most = record.crashes + 1, self._manager.settings.max_attempts
        cause = f"while its memory was measured, {outcome.cause}; attempt {crashes} of {most}"
        _logger.warning("job %s: %s", record.id, cause)
        with suppress(StoreError):  # The job stays queued and is measured again.
            if crashes >= most:
                await self._manager.refuse(record, cause, JobState.QUARANTINED)
            else:
                await self._manager.jobs.count_crash(record.id, crashes)
        await self._manager.back_off(crashes)

    # Measuring

    async def _measured(self, job: Job, make_workload: Callable[[], Workload], record: JobRecord) -> Mapping[str, int]:
        processes = self._manager.processes
        if processes is None or self._measure is not None:
            return await self._in_thread(job, make_workload, record)
        return await self._unless_unwanted(record.id, processes.measure(record.id, job, make_workload))

    async def _in_thread(self, job: Job, make_workload: Callable[[], Workload], record: JobRecord) -> Mapping[str, int]:
        count_crash = self._manager.jobs.count_crash
        # If the service dies of it, the job has had an attempt.
        with suppress(StoreError):
            await count_crash(record.id, record.crashes + 1)
        try:
            async with DedicatedThread("asyncpipe-footprint") as thread:
                return await thread.run(lambda: self._footprint(job, make_workload, record.id))
        finally:
            with suppress(StoreError):
                await count_crash(record.id, record.crashes)

    async def _unless_unwanted(self, job: str, measuring: Coroutine[Any, Any, Mapping[str, int]]) -> Mapping[str, int]:
        task = asyncio.create_task(measuring)
        ends = (self._manager.jobs.until_not_queued(job), self._manager.ending.wait())
        over = [asyncio.create_task(each) for each in ends]
        try:
            await asyncio.wait([task, *over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_measured = task.done()
            for each in (task, *over):
                each.cancel()
            await asyncio.wait([task, *over])
        if not is_measured:
            raise _Obsolete
        return task.result()

    def _footprint(self, job: Job, make_workload: Callable[[], Workload], record: str) -> Mapping[str, int]:
        """The job's peak memory. Blocks, in a thread."""

        def check_wanted(_: str = "") -> None:
            if self._manager.shutdown is not None or record not in self._manager.jobs.queued:
                raise _Obsolete

        workload = RunRandom(shared=True).build(job.training.seed, make_workload)
        check_wanted()
        return (self._measure or footprint)(job, workload, progress=check_wanted)


class _Obsolete(Exception):
    """Ends a measurement whose job is no longer queued."""


def retries_of(record: JobRecord) -> int:
    """How many failures in a row, without a new snapshot, the job may have."""
    retries = record.spec.table("faults").get("snapshot_retries")
    return retries if isinstance(retries, int) else 0
