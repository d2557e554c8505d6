"""The jobs of a service that have not ended: what clients ask of them, and the only way in which one changes its state.

::

    clients ──┐                    ┌──▶ store      on disk first; if that fails, nothing changes
    Manager ──┴──▶ turn ─▶ become ─┼──▶ log        if it is in use
                                   ├──▶ metrics
                                   └──▶ queued     and the manager looks at the queue again

Whoever changes a job holds its turn (a lock), so what was read of the job is still true when it is changed. A job that
is not running changes its state at once. For a running job the store keeps the request, the run is told, and the
manager makes the transition when the run has ended::

    pause    queued ──▶ paused        running ──▶ asked: paused     ──▶ ends after its step, with a snapshot
    cancel   queued ──▶ cancelled     running ──▶ asked: cancelled  ──▶ ends between two tasks
    resume   paused ──▶ queued        running, asked: paused ──▶ asked: nothing, runs again when it has ended

While the store cannot be written, as on a full disk, pause and cancel are kept in memory (``unsaved``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from asyncpipe.errors import AsyncpipeError
from asyncpipe.service.job_states import FINAL_STATES, JobRecord, JobState, JobStateError, check_asking
from asyncpipe.service.jobs.job_lines import log_change, log_note, log_recovered
from asyncpipe.service.jobs.job_log import JobLogs
from asyncpipe.service.jobs.job_queue import JobQueue
from asyncpipe.service.jobs.job_run import JobRun
from asyncpipe.service.jobs.service_metrics import MOST_FAILED, ServiceMetrics
from asyncpipe.service.jobs.usage import Usage
from asyncpipe.service.store.job_store import JobFilter, JobStore, StoreError, UnknownJobError
from asyncpipe.service.submission.submission import check_new_schedule

__all__ = ["ActiveJobs"]

PAGE = 1000


class ActiveJobs:
    """The queued and the running jobs. Belongs to the service's loop.

    When a request of a client returns, its effect is on disk, or in ``unsaved``. It raises ``UnknownJobError``;
    ``JobStateError`` if the job's state does not allow it; ``StoreError``, and it changed nothing then.
    """

    def __init__(
        self,
        store: JobStore,
        logs: JobLogs,
        metrics: ServiceMetrics,
        is_suspect: Callable[[JobRecord], bool] = lambda record: False,
        usage: Usage | None = None,
    ) -> None:
        """Jobs for which ``is_suspect`` is true wait to run alone. ``usage`` has the shares of users."""
        self.store = store
        self.queue = JobQueue(usage)
        self.running: dict[str, JobRun] = {}
        """From the transition to ``running`` to the next one."""
        self.changed = asyncio.Event()
        """Set when a queued job might be able to start, or a deadline might be the next one."""
        self.unsaved: dict[str, tuple[JobState, str]] = {}
        """What jobs are to become, and why, that the store could not record; a kill forgets it."""
        self._logs = logs
        self._metrics = metrics
        self._is_suspect = is_suspect
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def load(self, *, most_crashes: int, resume: bool, since: float = 0.0) -> tuple[JobRecord, ...]:
        """Load the jobs that the last process left; returns those that this has changed. Arguments as ``recover``.

        What users have used ``since`` then is loaded as well. Raises ``StoreError``.
        """
        recovered = await self.store.recover(most_crashes=most_crashes, resume=resume)
        for record in recovered:
            log_recovered(record)
        for run in await self.store.runs(since):
            self.queue.usage.begin(run.owner, run.job, len(run.devices), run.began)
            self.queue.usage.end(run.owner, run.job, run.began if run.ended is None else run.ended)
        queued = JobFilter(frozenset({JobState.QUEUED}))
        page = await self.store.list(queued, limit=PAGE)
        while page:
            for record in page:
                self._enqueue(record)
            page = await self.store.list(queued, limit=PAGE, after=page[-1].id)
        self._metrics.there_are(await self.store.count())
        self._metrics.have_failed(await self.store.last_failures(MOST_FAILED))
        return recovered

    # Transitions

    def turn(self, job: str) -> asyncio.Lock:
        """The lock that is held while ``job`` is changed."""
        return self._turns.setdefault(job, asyncio.Lock())

    async def become(
        self,
        record: JobRecord,
        to: JobState,
        cause: str,
        *,
        is_retry: bool = False,
        **more: Any,
    ) -> JobRecord:
        """The job of ``record`` after its transition to ``to``. ``more`` and errors as of ``JobStore.transition``.

        ``is_retry`` as of ``follow``.
        """
        after = await self.store.transition(record.id, to, cause, expect=record.state, **more)
        if to is JobState.RUNNING:
            self._metrics.waited(after.updated - record.updated)
        if is_retry:
            self._metrics.retried("snapshot")
        self.follow(record.state, after, is_retry=is_retry)
        return after

    def follow(self, before: JobState | None, record: JobRecord, *, is_retry: bool = False) -> None:
        """Follow a transition that the store has: log lines, metrics, the job's log and the queue.

        The caller holds the job's turn. ``before`` is the state before, ``None`` for a new job; ``is_retry`` if a run
        has failed and the job goes on from its last snapshot.
        """
        log_change(before, record, is_retry=is_retry)
        self._metrics.changed(before, record)
        if (log := self._logs.of(record.id)) is not None:
            log.state(record)
        if record.state is JobState.QUEUED:
            self._enqueue(record)
        else:
            self.queue.discard(record.id)
            self._metrics.users.unqueued(record.id)
        if record.state is not JobState.RUNNING:
            self.running.pop(record.id, None)
            self.queue.usage.end(record.owner, record.id, record.updated)
        else:
            self.queue.usage.begin(record.owner, record.id, len(record.devices), record.updated)
        self.changed.set()

    def forget(self, record: JobRecord) -> None:
        """Follow the deletion of a job that had ended."""
        self._metrics.deleted(record.state)

    def _enqueue(self, record: JobRecord) -> None:
        self._metrics.users.queued(record)
        self.queue.put(record, alone=self._is_suspect(record))

    def _update(self, record: JobRecord) -> JobRecord:
        """``record``, which replaces that of a job whose state has not changed."""
        if record.id in self.queue:
            self._enqueue(record)
        elif (run := self.running.get(record.id)) is not None:
            run.record = record
        return record

    # Requests of clients

    async def submit(
        self, document: Mapping[str, Any], idempotency_key: str | None, **more: Any
    ) -> tuple[JobRecord, bool]:
        """The job, and whether it is new. ``more`` and errors as of ``JobStore.add``."""
        record, new = await self.store.add(document, idempotency_key, **more)
        if new:
            self.follow(None, record)
        return record, new

    async def pause(self, job: str, cause: str) -> JobRecord:
        """The job, paused, or running and asked to pause after its step."""
        return await self._end(job, JobState.PAUSED, cause, lambda run: run.orders.stop())

    async def cancel(self, job: str, cause: str) -> JobRecord:
        """The job, cancelled, or running and asked to end after the current tasks."""
        return await self._end(job, JobState.CANCELLED, cause, JobRun.cancel)

    async def _end(self, job: str, to: JobState, cause: str, end: Callable[[JobRun], None]) -> JobRecord:
        async with self.turn(job):
            run = self.running.get(job)
            try:
                if run is None:
                    return await self.become(await self.store.get(job), to, cause)
                check_asking(job, run.record.state, run.record.asked, to)
                record = self._update(await self.store.ask(job, to, cause))
            except StoreError:
                if self.store.trouble is None:
                    raise
                self.unsaved[job] = to, cause
                self.queue.discard(job)
                record = self.as_asked(await self.store.get(job) if run is None else run.record)
                log_note(logging.WARNING, record, f"is to become {to}; that is not saved until its store has room")
            if run is not None:
                run.record = record
                end(run)
            return record

    async def save(self) -> None:
        """Record what was asked while the store could not be written. Raises ``StoreError`` if it still cannot."""
        for job in list(self.unsaved):
            to, cause = self.unsaved.pop(job)
            with suppress(JobStateError, UnknownJobError):  # It has ended meanwhile.
                await self._end(job, to, cause, lambda run: None)

    def as_asked(self, record: JobRecord) -> JobRecord:
        """``record`` with what was asked of its job and is not saved. From any thread."""
        to, cause = self.unsaved.get(record.id, (record.asked, record.asked_cause))
        return replace(record, asked=to, asked_cause=cause)

    async def resume(self, job: str, cause: str) -> JobRecord:
        """The job, queued, or still running and no longer asked to pause. Raises ``QueueFullError``.

        A job that still runs is queued again when its run has ended, also if the queue is full.
        """
        async with self.turn(job):
            if job in self.running:
                return self._update(await self.store.ask(job, None, cause))
            record = await self.store.get(job)
            if record.state in FINAL_STATES:  # Which is more than to resume: `retry`.
                raise JobStateError(job, record.state, "be resumed, as it has ended")
            return await self.become(record, JobState.QUEUED, cause, admit=True)

    async def amend(self, job: str, **changes: Any) -> JobRecord:
        """The job with another class, weight, priority or other tags, which ``check_amendment`` has checked.

        A running job has its new share from its next step on. Of a job that has ended, only the tags can change.
        """
        async with self.turn(job):
            record = self._update(await self.store.amend(job, **changes))
            if (run := self.running.get(job)) is not None:
                run.change_share()
            self.changed.set()
            return record

    async def change_schedule(self, job: str, schedule: str) -> JobRecord:
        """The job, which follows ``schedule`` from its next step on, also after a restart.

        Raises ``SubmissionError`` for a schedule that is not registered or cannot serve the job, ``ScheduleError`` if
        the job's pipeline cannot follow it.
        """
        record = await self.store.get(job)
        if record.state in FINAL_STATES:
            raise JobStateError(job, record.state, "change its schedule")
        pipeline = check_new_schedule(record, schedule)
        while True:
            run = self.running.get(job)
            if run is None:
                async with self.turn(job):
                    if job not in self.running:
                        return self._update(await self.store.amend(job, pipeline=pipeline))
            elif (changed := await self._change_running(run, pipeline)) is not None:
                return changed

    async def _change_running(self, run: JobRun, pipeline: Mapping[str, Any]) -> JobRecord | None:
        """The job after its run changed the schedule; ``None`` if the run ended before that was in the store.

        The job's turn is not held while the run finishes its step, so the job can be cancelled meanwhile.
        """
        job = run.record.id
        async with run.schedule_turn:
            before = run.record.schedule or run.job.pipeline.schedule
            changed = await run.change_schedule(
                pipeline["schedule"]
            )  # If not, the run ends; the manager makes its transition.
            async with self.turn(job):
                if self.running.get(job) is not run:
                    return None
                try:
                    return self._update(await self.store.amend(job, pipeline=pipeline))
                except StoreError:
                    if changed:  # The request failed, so it must have no effect.
                        with suppress(AsyncpipeError):
                            await run.change_schedule(before)
                    raise
