"""Deadlines: a job that has not ended by then fails, whatever it does at that moment.

::

    queued, paused ──▶ failed
    running        ──▶ ends after its step, with a snapshot ──▶ failed; cancelled between two tasks if that takes long

A failed job can be retried, then without the deadline that has passed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

from asyncpipe.service.job_states import FINAL_STATES, JobState
from asyncpipe.service.jobs.active_jobs import ActiveJobs
from asyncpipe.service.store.job_store import StoreError, UnknownJobError

__all__ = ["Deadlines"]

_logger = logging.getLogger(__name__)

LONGEST_SLEEP = 600.0
"""Seconds after which the clock is looked at again: somebody may have set it."""


class Deadlines:
    """Ends the ``jobs`` whose deadline has passed, on the service's loop, as long as ``watch`` is awaited."""

    def __init__(
        self,
        jobs: ActiveJobs,
        grace_seconds: float,
        retry_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """A running job has ``grace_seconds`` to end its step. ``clock`` returns Unix times."""
        self._jobs = jobs
        self._grace_seconds = grace_seconds
        self._retry_seconds = retry_seconds
        self._clock = clock

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            self._jobs.timed.clear()
            try:
                pause = await self._end_those_due()
            except StoreError as error:
                _logger.error("deadlines cannot be looked at, will try again: %s", error)
                pause = self._retry_seconds
            try:
                async with asyncio.timeout(pause):
                    await self._jobs.timed.wait()
            except TimeoutError:
                pass

    async def _end_those_due(self) -> float:
        """Seconds until the next deadline, or until the clock is to be looked at."""
        now = self._clock()
        jobs, following = await self._jobs.store.due(now)
        for job in jobs:
            await self._end(job)
        return LONGEST_SLEEP if following is None else min(max(following - now, 0.0), LONGEST_SLEEP)

    async def _end(self, job: str) -> None:
        async with self._jobs.turn(job):
            if (run := self._jobs.running.get(job)) is not None:
                if run.expired is None:
                    run.expire(_cause(run.record.deadline))
                    asyncio.get_running_loop().call_later(self._grace_seconds, run.cancel)
                return
            try:
                record = await self._jobs.store.get(job)
            except UnknownJobError:  # Deleted meanwhile.
                return
            if record.state not in FINAL_STATES and record.state is not JobState.RUNNING:
                await self._jobs.become(record, JobState.FAILED, _cause(record.deadline))


def _cause(deadline: float | None) -> str:
    at = datetime.fromtimestamp(deadline or 0.0, UTC)
    return f"its deadline, {at:%Y-%m-%d %H:%M:%S} UTC, has passed"
