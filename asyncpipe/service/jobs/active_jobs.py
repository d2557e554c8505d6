"""The jobs of a service that have not ended, and the only way in which a job changes its state.

::

    JobControl ──┐                    ┌──▶ store      on disk first; if that fails, nothing changes
    Manager ─────┴──▶ turn ─▶ become ─┼──▶ log        if it is in use
                                      ├──▶ metrics
                                      └──▶ queued     and the manager looks at the queue again

Whoever changes a job holds its turn (a lock), so what was read of the job is still true when it is changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakValueDictionary

from asyncpipe.service.job_states import FINAL_STATES, JobRecord, JobState
from asyncpipe.service.jobs.job_log import JobLogs
from asyncpipe.service.jobs.job_run import JobRun
from asyncpipe.service.jobs.service_metrics import ServiceMetrics
from asyncpipe.service.store.job_store import JobStore

__all__ = ["ActiveJobs"]

PAGE = 1000


class ActiveJobs:
    """The queued and the running jobs. Belongs to the service's loop."""

    def __init__(
        self,
        store: JobStore,
        logs: JobLogs,
        metrics: ServiceMetrics,
        ended: Callable[[str], object] = lambda job: None,
    ) -> None:
        """``ended`` is called with each job that reaches a final state."""
        self._ended = ended
        self.store = store
        self.logs = logs
        self.metrics = metrics
        self.queued: dict[str, JobRecord] = {}
        self.running: dict[str, JobRun] = {}
        """From the transition to ``running`` to the next one."""
        self.changed = asyncio.Event()
        """Set when a queued job might be able to start."""
        self.version = 0
        """Goes up whenever a job changes its state."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def turn(self, job: str) -> asyncio.Lock:
        """The lock that is held while ``job`` is changed."""
        return self._turns.setdefault(job, asyncio.Lock())

    async def load(self) -> tuple[JobRecord, ...]:
        """Load the jobs that the last process left; returns those that were running. Raises ``StoreError``."""
        recovered = await self.store.recover()
        page = await self.store.list([JobState.QUEUED], limit=PAGE)
        while page:
            self.queued.update((record.id, record) for record in page)
            page = await self.store.list([JobState.QUEUED], limit=PAGE, after=page[-1].id)
        self.metrics.there_are(await self.store.count())
        return recovered

    async def become(self, record: JobRecord, to: JobState, cause: str, most_queued: int | None = None) -> JobRecord:
        """The job of ``record`` after its transition to ``to``. Raises as ``JobStore.transition``."""
        after = await self.store.transition(record.id, to, cause, expect=record.state, most_queued=most_queued)
        self.metrics.changed(record.state, to)
        if to is JobState.RUNNING:
            self.metrics.waited(after.updated - record.updated)
        self._keep(after)
        return after

    def added(self, record: JobRecord) -> None:
        """Add a new job, which the store has."""
        self.metrics.changed(None, record.state)
        self._keep(record)

    def update(self, record: JobRecord) -> None:
        """Replace the record of a job whose state has not changed."""
        if record.id in self.queued:
            self.queued[record.id] = record
        elif (run := self.running.get(record.id)) is not None:
            run.record = record

    def _keep(self, record: JobRecord) -> None:
        self.version += 1
        if (log := self.logs.of(record.id)) is not None:
            log.state(record)
        if record.state is JobState.QUEUED:
            self.queued[record.id] = record
        else:
            self.queued.pop(record.id, None)
        if record.state is not JobState.RUNNING:
            self.running.pop(record.id, None)
        if record.state in FINAL_STATES:
            self._ended(record.id)
        self.changed.set()
