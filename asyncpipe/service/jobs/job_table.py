"""The living jobs of a service, and the only way in which a job changes its state.

::

    requests ──┐                    ┌──▶ store     on disk, or nothing was changed
    Manager ───┴──▶ turn ─▶ become ─┼──▶ log       if somebody uses it
                                    ├──▶ metrics
                                    └──▶ queued    who waits; the manager looks again

Whoever changes a job holds its turn, so what was read of it is still true when it is changed. Memory follows the store,
never the other way round.
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

__all__ = ["JobTable"]

PAGE = 1000


class JobTable:
    """Who waits and who runs. Belongs to the service's loop."""

    def __init__(
        self,
        store: JobStore,
        logs: JobLogs,
        metrics: ServiceMetrics,
        ended: Callable[[str], object] = lambda job: None,
    ) -> None:
        """``ended`` is called with a job that has reached its end, whoever led it there."""
        self._ended = ended
        self.store = store
        self.logs = logs
        self.metrics = metrics
        self.queued: dict[str, JobRecord] = {}
        self.running: dict[str, JobRun] = {}
        """From the transition to ``running`` to the one away from it."""
        self.changed = asyncio.Event()
        """Set when it may be somebody's turn to begin."""
        self.version = 0
        """Another one whenever a job has changed its state."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def turn(self, job: str) -> asyncio.Lock:
        """To be held by whoever changes ``job``."""
        turn = self._turns.get(job)
        if turn is None:
            turn = self._turns[job] = asyncio.Lock()
        return turn

    async def load(self) -> tuple[JobRecord, ...]:
        """Take over what the last process left; returns the jobs that were running then. Raises ``StoreError``."""
        recovered = await self.store.recover()
        page = await self.store.list([JobState.QUEUED], limit=PAGE)
        while page:
            self.queued.update((record.id, record) for record in page)
            page = await self.store.list([JobState.QUEUED], limit=PAGE, after=page[-1].id)
        self.metrics.there_are(await self.store.count())
        return recovered

    async def become(self, record: JobRecord, to: JobState, cause: str, most_queued: int | None = None) -> JobRecord:
        """``record``'s job after it became ``to``; the caller holds its turn. Raises as ``JobStore.transition``."""
        after = await self.store.transition(record.id, to, cause, expect=record.state, most_queued=most_queued)
        self.metrics.changed(record.state, to)
        if to is JobState.RUNNING:
            self.metrics.waited(after.updated - record.updated)
        self._keep(after)
        return after

    def added(self, record: JobRecord) -> None:
        """A job was submitted that is new."""
        self.metrics.changed(None, record.state)
        self._keep(record)

    def update(self, record: JobRecord) -> None:
        """Something else of a job changed than its state."""
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
