"""Deadlines: a job that has not ended by its deadline fails, in whatever state it is.

::

    queued, paused ──▶ failed
    running        ──▶ ends after its step, with a snapshot ──▶ failed; cancelled between two tasks if that takes long

A failed job can be retried, then without the deadline that has passed.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from asyncpipe.service.job_states import FINAL_STATES, JobState
from asyncpipe.service.jobs.active_jobs import ActiveJobs
from asyncpipe.service.store.job_store import UnknownJobError

__all__ = ["end_overdue"]

LONGEST_PAUSE = 600.0
"""Seconds after which the clock is looked at again: somebody may have set it."""


async def end_overdue(jobs: ActiveJobs, now: float, grace_seconds: float) -> float:
    """End the jobs whose deadline has passed at the Unix time ``now``; the seconds until it is to be called again.

    A running job has ``grace_seconds`` to end its step.
    """
    due, following = await jobs.store.due(now)
    for job in due:
        async with jobs.turn(job):
            await _end(jobs, job, grace_seconds)
    return LONGEST_PAUSE if following is None else min(max(following - now, 0.0), LONGEST_PAUSE)


async def _end(jobs: ActiveJobs, job: str, grace_seconds: float) -> None:
    if (run := jobs.running.get(job)) is not None:
        if run.expired is None:
            run.expire(_cause(run.record.deadline))
            asyncio.get_running_loop().call_later(grace_seconds, run.cancel)
        return
    try:
        record = await jobs.store.get(job)
    except UnknownJobError:  # Deleted meanwhile.
        return
    if record.state not in FINAL_STATES and record.state is not JobState.RUNNING:
        await jobs.become(record, JobState.FAILED, _cause(record.deadline))


def _cause(deadline: float | None) -> str:
    at = datetime.fromtimestamp(deadline or 0.0, UTC)
    return f"its deadline, {at:%Y-%m-%d %H:%M:%S} UTC, has passed"
