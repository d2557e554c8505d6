"""The SQL of what happens to jobs that have ended: they are retried, copied, and deleted. In the store's thread."""

from __future__ import annotations

import sqlite3
from typing import NamedTuple

from asyncpipe.service.job_states import FINAL_STATES, JobRecord, JobSpec, JobState, JobStateError
from asyncpipe.service.store.queries import add_job, change_state
from asyncpipe.service.store.reading import find_job

__all__ = ["StoredJob", "delete_job", "fork_job", "retry_job", "stored_jobs"]


class StoredJob(NamedTuple):
    """What the store says of a job that its folder must agree with."""

    id: str
    name: str
    state: JobState
    updated: float
    """The Unix time of its last transition, for a job that has ended."""
    attempts: int
    snapshot: str | None


def stored_jobs(connection: sqlite3.Connection) -> list[StoredJob]:
    """All jobs, oldest first."""
    rows = connection.execute("SELECT id, name, state, updated, attempts, snapshot FROM jobs ORDER BY number")
    return [
        StoredJob(job, name, JobState(state), updated, attempts, snapshot)
        for job, name, state, updated, attempts, snapshot in rows.fetchall()
    ]


def retry_job(
    connection: sqlite3.Connection,
    job: str,
    at: float,
    cause: str,
    from_step: int | None = None,
    spec: JobSpec | None = None,
    most_queued: int | None = None,
) -> JobRecord:
    """``job``, which has ended, queued again: from the snapshot of ``from_step``, and with ``spec`` if it is given.

    Raises as ``change_state``.
    """
    if (state := find_job(connection, job).state) not in FINAL_STATES:
        raise JobStateError(job, state, "be retried, since it has not ended")
    change_state(connection, job, JobState.QUEUED, at, cause, most_queued=most_queued)
    if from_step is not None:
        connection.execute(
            "UPDATE jobs SET from_step = ?, step = ?, snapshot = ? WHERE id = ?",
            (from_step, from_step, f"step-{from_step}" if from_step else None, job),
        )
    if spec is not None:
        (number,) = connection.execute("SELECT number FROM jobs WHERE id = ?", (job,)).fetchone()
        # What holds in place of the specification's values gives way to them.
        connection.execute(
            "UPDATE jobs SET priority_class = ?, weight = ?, schedule = NULL WHERE number = ?",
            (spec.priority_class, spec.weight, number),
        )
        connection.execute("UPDATE specs SET spec = ? WHERE job = ?", (spec.to_json(), number))
    return find_job(connection, job)


def fork_job(
    connection: sqlite3.Connection,
    job: str,
    spec: JobSpec,
    at: float,
    forked_from: str,
    step: int,
    most_queued: int | None = None,
) -> JobRecord:
    """The new ``job``, queued, whose folder has the snapshot of ``step``, if that is not 0.

    Raises ``QueueFullError``.
    """
    add_job(connection, job, spec, at, None, most_queued, forked_from)
    cause = f"forked from {forked_from}" + (f" after step {step}" if step else "")
    connection.execute("UPDATE jobs SET cause = ? WHERE id = ?", (cause, job))
    connection.execute(
        "UPDATE transitions SET cause = ? WHERE job = (SELECT number FROM jobs WHERE id = ?)", (cause, job)
    )
    if step:
        connection.execute("UPDATE jobs SET step = ?, snapshot = ? WHERE id = ?", (step, f"step-{step}", job))
    return find_job(connection, job)


def delete_job(connection: sqlite3.Connection, job: str) -> JobRecord:
    """The job that is not there any more. Raises ``UnknownJobError``, ``JobStateError`` if it has not ended."""
    record = find_job(connection, job)
    if record.state not in FINAL_STATES:
        raise JobStateError(job, record.state, "be deleted before it has ended")
    connection.execute("DELETE FROM jobs WHERE id = ?", (job,))
    return record
