"""The requests of clients: submit, pause, resume and cancel a job, and change its schedule.

When one of these methods returns, its effect is on disk. A job that is not running changes its state at once. For a
running job the store keeps the request, the run is told, and the manager makes the transition when the run has ended::

    pause    queued ──▶ paused        running ──▶ asked: paused     ──▶ ends after its step, with a snapshot
    cancel   queued ──▶ cancelled     running ──▶ asked: cancelled  ──▶ ends between two tasks
    resume   paused ──▶ queued        running, asked: paused ──▶ asked: nothing, runs again when it has ended
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from asyncpipe.errors import AsyncpipeError
from asyncpipe.service.job_states import FINAL_STATES, JobRecord, JobSpec, JobState, JobStateError
from asyncpipe.service.jobs.active_jobs import ActiveJobs
from asyncpipe.service.jobs.job_run import JobRun
from asyncpipe.service.store.job_store import StoreError
from asyncpipe.service.submission.submission import check_new_schedule

__all__ = ["JobControl"]


class JobControl:
    """Carries out the requests of clients, for each job one after the other. Belongs to the service's loop.

    Raises ``UnknownJobError``; ``JobStateError`` for a request that the job's state does not allow; ``StoreError``,
    and the request changed nothing then.
    """

    def __init__(self, jobs: ActiveJobs, most_queued: int) -> None:
        self._jobs = jobs
        self._most_queued = most_queued

    async def submit(self, spec: JobSpec, idempotency_key: str | None) -> tuple[JobRecord, bool]:
        """The job, and whether it is new. Raises as ``JobStore.add``."""
        record, new = await self._jobs.store.add(spec, idempotency_key, most_queued=self._most_queued)
        if new:
            self._jobs.added(record)
        return record, new

    async def pause(self, job: str, cause: str) -> JobRecord:
        """The job, paused, or running and asked to pause after its step."""
        return await self._end(job, JobState.PAUSED, cause, JobRun.stop)

    async def cancel(self, job: str, cause: str) -> JobRecord:
        """The job, cancelled, or running and asked to end after the current tasks."""
        return await self._end(job, JobState.CANCELLED, cause, JobRun.cancel)

    async def _end(self, job: str, to: JobState, cause: str, end: Callable[[JobRun], None]) -> JobRecord:
        async with self._jobs.turn(job):
            if (run := self._jobs.running.get(job)) is not None:
                record = await self._ask(run, to, cause)
                end(run)
                return record
            return await self._jobs.become(await self._jobs.store.get(job), to, cause)

    async def resume(self, job: str, cause: str) -> JobRecord:
        """The job, queued, or still running and no longer asked to pause. Raises ``QueueFullError``.

        A job that still runs is queued again when its run has ended, also if the queue is full.
        """
        async with self._jobs.turn(job):
            if (run := self._jobs.running.get(job)) is not None:
                return await self._ask(run, None, cause)
            record = await self._jobs.store.get(job)
            return await self._jobs.become(record, JobState.QUEUED, cause, self._most_queued)

    async def change_schedule(self, job: str, schedule: str) -> JobRecord:
        """The job, which follows ``schedule`` from its next step on, also after a restart.

        Raises ``SubmissionError`` for a schedule that is not registered or cannot serve the job, ``ScheduleError`` if
        the job's pipeline cannot follow it.
        """
        record = await self._jobs.store.get(job)
        if record.state in FINAL_STATES:
            raise JobStateError(job, record.state, "change its schedule")
        check_new_schedule(record.spec, schedule)
        while True:
            run = self._jobs.running.get(job)
            if run is None:
                async with self._jobs.turn(job):
                    if job not in self._jobs.running:
                        return await self._store_schedule(job, schedule)
            elif (changed := await self._change_running(run, schedule)) is not None:
                return changed

    async def _change_running(self, run: JobRun, schedule: str) -> JobRecord | None:
        """The job after its run changed the schedule; ``None`` if the run ended before that was in the store.

        The job's turn is not held while the run finishes its step, so the job can be cancelled meanwhile.
        """
        job = run.record.id
        async with run.schedule_turn:
            before = run.record.schedule or run.job.pipeline.schedule
            if not await run.change_schedule(schedule):
                # The run ends; the manager makes its transition.
                async with self._jobs.turn(job):
                    return await self._store_schedule(job, schedule) if self._jobs.running.get(job) is run else None
            async with self._jobs.turn(job):
                if self._jobs.running.get(job) is not run:
                    return None
                try:
                    return await self._store_schedule(job, schedule)
                except StoreError:
                    # The request failed, so it must have no effect.
                    with suppress(AsyncpipeError):
                        await run.change_schedule(before)
                    raise

    async def _store_schedule(self, job: str, schedule: str) -> JobRecord:
        record = await self._jobs.store.change_schedule(job, schedule)
        self._jobs.update(record)
        return record

    async def _ask(self, run: JobRun, to: JobState | None, cause: str) -> JobRecord:
        record = await self._jobs.store.ask(run.record.id, to, cause)
        self._jobs.update(record)
        return record
