"""The SQL that changes the job store: each function is part of one transaction and is called in the store's thread.

``reading.py`` has the SQL that reads it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncpipe.errors import AsyncpipeError
from asyncpipe.service.job_states import (
    FINAL_STATES,
    JobRecord,
    JobSpec,
    JobState,
    JobStateError,
    PriorityClass,
    check_asking,
    check_transition,
)
from asyncpipe.service.store.reading import FROM, PastDeadlineError, find_job, number_and_state

__all__ = [
    "IdempotencyConflictError",
    "QueueFullError",
    "add_job",
    "amend_job",
    "ask_job",
    "change_schedule",
    "change_state",
    "count_crash",
    "note_progress",
    "pause_queued",
    "recover_jobs",
]

_BY_CLASS = f"CASE priority_class WHEN '{PriorityClass.FOREGROUND}' THEN 0 ELSE 1 END, number"


class IdempotencyConflictError(AsyncpipeError, ValueError):
    """An idempotency key was used before with another specification; ``job`` is the id of the job that it created."""

    def __init__(self, key: str, job: str) -> None:
        rule = "send the same specification to get that job, or another key to submit a new one"
        super().__init__(f"the idempotency key {key!r} belongs to job {job}, which has another specification; {rule}")
        self.key = key
        self.job = job

    def __reduce__(self) -> tuple[type[IdempotencyConflictError], tuple[str, str]]:
        return type(self), (self.key, self.job)


class QueueFullError(AsyncpipeError, RuntimeError):
    """The queue is full; the job was not submitted or resumed."""

    def __init__(self, most: int) -> None:
        super().__init__(f"the queue is full: {most} jobs wait; try again when some of them have begun")
        self.most = most

    def __reduce__(self) -> tuple[type[QueueFullError], tuple[int]]:
        return type(self), (self.most,)


# Writing


def add_job(
    connection: sqlite3.Connection,
    job: str,
    spec: JobSpec,
    at: float,
    key: str | None,
    most_queued: int | None = None,
    forked_from: str | None = None,
) -> JobRecord:
    """A new job, queued; or the job that ``key`` created before with the same ``spec``.

    Raises ``IdempotencyConflictError``, ``QueueFullError`` if ``most_queued`` jobs are queued already, and
    ``PastDeadlineError``.
    """
    text = spec.to_json()
    if key is not None:
        row = connection.execute(f"SELECT id, spec {FROM} WHERE idempotency_key = ?", (key,)).fetchone()
        if row is not None and row[1] != text:
            raise IdempotencyConflictError(key, row[0])
        if row is not None:
            return find_job(connection, row[0])
    if spec.deadline is not None and spec.deadline <= at:
        raise PastDeadlineError(spec.deadline)
    _check_room(connection, most_queued)
    cause = "submitted"
    number = connection.execute(
        "INSERT INTO jobs (id, name, entry, priority_class, weight, tags, deadline, state, cause,"
        " submitted, updated, idempotency_key, forked_from) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (job, spec.name, spec.entry, spec.priority_class, spec.weight, json.dumps(spec.tags), spec.deadline,
         JobState.QUEUED, cause, at, at, key, forked_from),
    ).lastrowid  # fmt: skip
    connection.execute("INSERT INTO specs (job, spec) VALUES (?, ?)", (number, text))
    _add_tags(connection, number, spec.tags)
    _add_transition(connection, number, None, JobState.QUEUED, at, cause)
    return find_job(connection, job)


def change_state(
    connection: sqlite3.Connection,
    job: str,
    to: JobState,
    at: float,
    cause: str,
    expect: JobState | None = None,
    most_queued: int | None = None,
    crashed: bool = False,
) -> JobRecord:
    """``job`` after its transition to the state ``to``. A retried one has no crashes, and no deadline that has passed.

    ``crashed``: it has one more. Raises ``UnknownJobError``, ``JobStateError``, and ``QueueFullError`` if
    ``most_queued`` jobs are queued already.
    """
    number, state = number_and_state(connection, job)
    check_transition(job, state, to, expect)
    _check_room(connection, most_queued)
    connection.execute(
        "UPDATE jobs SET state = ?, cause = ?, updated = ?, attempts = attempts + ?, crashes = crashes + ?,"
        " asked = NULL, asked_cause = NULL WHERE number = ?",
        (to, cause, at, to is JobState.RUNNING, crashed, number),
    )
    if state in FINAL_STATES:
        connection.execute("UPDATE jobs SET crashes = 0 WHERE number = ?", (number,))
        connection.execute("UPDATE jobs SET deadline = NULL WHERE number = ? AND deadline <= ?", (number, at))
    if to is JobState.RUNNING:
        connection.execute("UPDATE jobs SET from_step = NULL WHERE number = ?", (number,))
    _add_transition(connection, number, state, to, at, cause)
    return find_job(connection, job)


def ask_job(connection: sqlite3.Connection, job: str, to: JobState | None, at: float, cause: str) -> JobRecord:
    """The running ``job`` with the request to become ``to``; raises as ``check_asking``.

    A repeated request keeps its first cause.
    """
    number, state = number_and_state(connection, job)
    record = find_job(connection, job)
    check_asking(job, state, record.asked, to)
    if to is record.asked:
        return record
    connection.execute(
        "UPDATE jobs SET asked = ?, asked_cause = ?, updated = ? WHERE number = ?",
        (to, None if to is None else cause, at, number),
    )
    return find_job(connection, job)


def change_schedule(connection: sqlite3.Connection, job: str, schedule: str, at: float) -> JobRecord:
    """``job`` with another schedule. Raises ``UnknownJobError``, and ``JobStateError`` for a job in a final state."""
    number, state = number_and_state(connection, job)
    if state in FINAL_STATES:
        raise JobStateError(job, state, "change its schedule")
    connection.execute("UPDATE jobs SET schedule = ?, updated = ? WHERE number = ?", (schedule, at, number))
    return find_job(connection, job)


def amend_job(connection: sqlite3.Connection, job: str, given: Mapping[str, Any], at: float) -> JobRecord:
    """``job`` with the ``given`` priority class, weight or tags. Raises ``UnknownJobError``, ``JobSpecError``."""
    number, _ = number_and_state(connection, job)
    spec = replace(find_job(connection, job).spec, **given)
    connection.execute(
        "UPDATE jobs SET priority_class = ?, weight = ?, tags = ?, updated = ? WHERE number = ?",
        (spec.priority_class, spec.weight, json.dumps(spec.tags), at, number),
    )
    connection.execute("DELETE FROM job_tags WHERE job = ?", (number,))
    _add_tags(connection, number, spec.tags)
    return find_job(connection, job)


def note_progress(connection: sqlite3.Connection, job: str, step: int, snapshot: str | None, at: float) -> None:
    """Record the progress of a running job. Raises ``UnknownJobError``, ``JobStateError``."""
    number, state = number_and_state(connection, job)
    if state is not JobState.RUNNING:
        raise JobStateError(job, state, "report progress")
    connection.execute(
        "UPDATE jobs SET step = ?, snapshot = coalesce(?, snapshot), crashes = iif(? IS NULL, crashes, 0), updated = ?"
        " WHERE number = ?",
        (step, snapshot, snapshot, at, number),
    )


def count_crash(connection: sqlite3.Connection, job: str, crashes: int) -> JobRecord:
    """``job`` with so many crashes. Raises ``UnknownJobError``."""
    number, _ = number_and_state(connection, job)
    connection.execute("UPDATE jobs SET crashes = ? WHERE number = ?", (crashes, number))
    return find_job(connection, job)


def pause_queued(connection: sqlite3.Connection, at: float, cause: str) -> None:
    """Pause all queued jobs."""
    for (job,) in connection.execute("SELECT id FROM jobs WHERE state = ?", (JobState.QUEUED,)).fetchall():
        change_state(connection, job, JobState.PAUSED, at, cause)


def recover_jobs(
    connection: sqlite3.Connection, at: float, to: JobState, cause: str, most_crashes: int
) -> tuple[JobRecord, ...]:
    """The jobs that were running, in ``to`` or what they were asked to become; foreground jobs first, then by age.

    The service died while they ran: each has one crash more. Those that have ``most_crashes`` then are quarantined, and
    so are queued ones, whose memory was measured.
    """
    rows = connection.execute(
        f"SELECT id, asked, asked_cause FROM jobs WHERE state = ? ORDER BY {_BY_CLASS}",  # noqa: S608 - no input
        (JobState.RUNNING,),
    ).fetchall()
    connection.execute("UPDATE jobs SET crashes = crashes + 1 WHERE state = ?", (JobState.RUNNING,))
    suspects = connection.execute(
        "SELECT id FROM jobs WHERE crashes >= ? AND state IN (?, ?) AND asked IS NOT ?",
        (most_crashes, JobState.RUNNING, JobState.QUEUED, JobState.CANCELLED),
    ).fetchall()
    for (job,) in suspects:
        why = f"the service died {most_crashes} times while it ran, or was measured, since its last snapshot"
        change_state(connection, job, JobState.QUARANTINED, at, why)
    return tuple(
        find_job(connection, job)
        if (job,) in suspects
        else change_state(connection, job, JobState(asked or to), at, asked_cause or cause)
        for job, asked, asked_cause in rows
    )


def _check_room(connection: sqlite3.Connection, most_queued: int | None) -> None:
    if most_queued is None:
        return
    (queued,) = connection.execute("SELECT count(*) FROM jobs WHERE state = ?", (JobState.QUEUED,)).fetchone()
    if queued >= most_queued:
        raise QueueFullError(most_queued)


def _add_tags(connection: sqlite3.Connection, number: int | None, tags: Sequence[str]) -> None:
    connection.executemany("INSERT INTO job_tags (tag, job) VALUES (?, ?)", [(tag, number) for tag in tags])


def _add_transition(
    connection: sqlite3.Connection, number: int | None, from_: JobState | None, to: JobState, at: float, cause: str
) -> None:
    connection.execute(
        "INSERT INTO transitions (job, from_state, to_state, at, cause) VALUES (?, ?, ?, ?, ?)",
        (number, from_, to, at, cause),
    )
