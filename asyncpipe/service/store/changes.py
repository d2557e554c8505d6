"""What has happened to all jobs, in the order of commits: for those who tell others of it.

As in ``queries.py``, each function is called in the store's thread.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from asyncpipe.service.job_states import JobRecord, JobState, Transition
from asyncpipe.service.store.reading import find_job

__all__ = ["TransitionsAfter", "last_failures", "newest_transition", "transitions_after"]

LOOKED_AT = 100_000
"""The last transitions among which ``last_failures`` looks."""


class TransitionsAfter(NamedTuple):
    """Some transitions in the order of commits, each with its job as it is now."""

    rows: tuple[tuple[Transition, JobRecord], ...]
    skipped: int
    """How many older ones there are as well."""
    newest: int
    """The number of the last transition of all."""


def newest_transition(connection: sqlite3.Connection) -> int:
    """The number of the last transition of all jobs; 0 if there is none."""
    (newest,) = connection.execute("SELECT coalesce(max(sequence), 0) FROM transitions").fetchone()
    return int(newest)


def transitions_after(
    connection: sqlite3.Connection, sequence: int, to: Sequence[JobState], limit: int, most: int
) -> TransitionsAfter:
    """The oldest ``limit`` of the newest ``most`` transitions after ``sequence`` to one of the states ``to``."""
    matching = f"FROM transitions WHERE sequence > ? AND to_state IN ({', '.join('?' * len(to))})"
    (count,) = connection.execute(f"SELECT count(*) {matching}", (sequence, *to)).fetchone()
    skipped = max(0, count - most)
    columns = "sequence, from_state, to_state, at, cause, (SELECT id FROM jobs WHERE number = job)"
    found = connection.execute(
        f"SELECT {columns} {matching} ORDER BY sequence LIMIT ? OFFSET ?",
        (sequence, *to, limit, skipped),
    )
    rows = tuple(
        (Transition(number, job, from_ and JobState(from_), JobState(state), at, cause), find_job(connection, job))
        for number, from_, state, at, cause, job in found.fetchall()
    )
    return TransitionsAfter(rows, skipped, newest_transition(connection))


def last_failures(connection: sqlite3.Connection, most: int) -> tuple[tuple[str, str, JobState, float], ...]:
    """(id, name, state, since when) of the last ``most`` jobs that are failed or quarantined, oldest first."""
    rows = connection.execute(
        "SELECT id, name, state, updated FROM jobs JOIN ("
        "  SELECT job, max(sequence) AS last FROM transitions WHERE sequence > ? AND to_state IN (?, ?) GROUP BY job"
        ") ON job = number WHERE state IN (?, ?) ORDER BY last DESC LIMIT ?",
        (newest_transition(connection) - LOOKED_AT, *([JobState.FAILED, JobState.QUARANTINED] * 2), most),
    )
    return tuple((job, name, JobState(state), at) for job, name, state, at in reversed(rows.fetchall()))
