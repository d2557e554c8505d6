"""What clients may ask of a job: submit, pause, resume, cancel, change its schedule.

What one of these returns is on disk. A job that does not run becomes at once what it shall; a running one needs a
moment, so what was asked is kept, the run is told, and the manager makes the transition when it has ended::

    pause    queued ──▶ paused        running ──▶ asked: paused     ──▶ ends after its step, with a snapshot
    cancel   queued ──▶ cancelled     running ──▶ asked: cancelled  ──▶ ends between two tasks
    resume   paused ──▶ queued        running, asked to pause ──▶ asked nothing: goes on when it has ended
"""

from __future__ import annotations

from contextlib import suppress

from asyncpipe.errors import AsyncpipeError
from asyncpipe.service.job_states import FINAL_STATES, JobRecord, JobSpec, JobState, JobStateError
from asyncpipe.service.jobs.job_run import JobRun
from asyncpipe.service.jobs.job_table import JobTable
from asyncpipe.service.store.job_store import StoreError
from asyncpipe.service.submission.submission import check_new_schedule

__all__ = ["JobControl"]


class JobControl:
    """What clients ask, done for one job at a time in the order in which it was asked. Of the service's loop.

    Raises ``UnknownJobError``; ``JobStateError`` for what a job cannot do in its state; ``StoreError``, and nothing
    was changed then.
    """

    def __init__(self, jobs: JobTable, most_queued: int) -> None:
        self._jobs = jobs
        self._most_queued = most_queued

    async def submit(self, spec: JobSpec, idempotency_key: str | None) -> tuple[JobRecord, bool]:
        """The job, and whether it is new. Raises as ``JobStore.add``."""
        record, new = await self._jobs.store.add(spec, idempotency_key, most_queued=self._most_queued)
        if new:
            self._jobs.added(record)
        return record, new

    async def pause(self, job: str, cause: str) -> JobRecord:
        """The job, which is paused, or will be after its step."""
        async with self._jobs.turn(job):
            if (run := self._jobs.running.get(job)) is not None:
                record = await self._ask(run, JobState.PAUSED, cause)
                run.stop()
                return record
            return await self._jobs.become(await self._jobs.store.get(job), JobState.PAUSED, cause)

    async def cancel(self, job: str, cause: str) -> JobRecord:
        """The job, which is cancelled, or will be after the task under way."""
        async with self._jobs.turn(job):
            if (run := self._jobs.running.get(job)) is not None:
                record = await self._ask(run, JobState.CANCELLED, cause)
                run.cancel()
                return record
            return await self._jobs.become(await self._jobs.store.get(job), JobState.CANCELLED, cause)

    async def resume(self, job: str, cause: str) -> JobRecord:
        """The job, which waits in the queue again, or will when it has stopped. Raises ``QueueFullError``.

        A running one keeps its place, as one that is tried again does.
        """
        async with self._jobs.turn(job):
            if (run := self._jobs.running.get(job)) is not None:
                return await self._ask(run, None, cause)
            record = await self._jobs.store.get(job)
            return await self._jobs.become(record, JobState.QUEUED, cause, self._most_queued)

    async def change_schedule(self, job: str, schedule: str) -> JobRecord:
        """The job, which follows ``schedule`` from its next step on, also after a restart.

        Raises ``SubmissionError`` for a name that is not registered, or cannot serve the job; ``ScheduleError`` where
        its pipeline cannot follow it.
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
                        return await self._keep_schedule(job, schedule)
            elif (changed := await self._change_running(run, schedule)) is not None:
                return changed

    async def _change_running(self, run: JobRun, schedule: str) -> JobRecord | None:
        """The job after its run changed the schedule; ``None`` if the run ended before that was kept.

        The job's turn is not held while its step goes on: it can be cancelled meanwhile.
        """
        job = run.record.id
        async with run.schedule_turn:
            before = run.record.schedule or run.job.pipeline.schedule
            if not await run.change_schedule(schedule):
                # Its last transition is under way.
                async with self._jobs.turn(job):
                    return await self._keep_schedule(job, schedule) if self._jobs.running.get(job) is run else None
            async with self._jobs.turn(job):
                if self._jobs.running.get(job) is not run:
                    return None
                try:
                    return await self._keep_schedule(job, schedule)
                except StoreError:
                    # What is not kept shall not be done.
                    with suppress(AsyncpipeError):
                        await run.change_schedule(before)
                    raise

    async def _keep_schedule(self, job: str, schedule: str) -> JobRecord:
        record = await self._jobs.store.change_schedule(job, schedule)
        self._jobs.update(record)
        return record

    async def _ask(self, run: JobRun, to: JobState | None, cause: str) -> JobRecord:
        record = await self._jobs.store.ask(run.record.id, to, cause)
        self._jobs.update(record)
        return record
