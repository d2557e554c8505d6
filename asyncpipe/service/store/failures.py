"""The SQL that groups jobs by how they have failed. Called in the store's thread."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass

from asyncpipe.service.store.finding import JobFilter, conditions_of

__all__ = ["FailureGroup", "find_failures"]

NEWEST = 5
"""How many jobs of a group of failures are named."""


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Jobs whose last failures have the same root line. Times are those of the jobs' last changes."""

    root: str
    count: int
    first: float
    last: float
    users: list[str]
    jobs: list[str]
    """The newest of them, newest first."""
    example: str
    """The cause of the newest."""


def find_failures(db: sqlite3.Connection, wanted: JobFilter, limit: int) -> tuple[FailureGroup, ...]:
    """At most ``limit`` groups of the ``wanted`` jobs, in any state, those with the newest jobs first."""
    conditions, given = conditions_of(wanted)
    where = " AND ".join(["root IS NOT NULL", *conditions])
    users = "json_group_array(DISTINCT owner) FILTER (WHERE owner IS NOT NULL)"
    groups = f"SELECT root, count(*), min(updated), max(updated), {users} FROM jobs WHERE {where} GROUP BY root"  # noqa: S608 - no input
    newest = f"SELECT id, cause FROM jobs WHERE {where} AND root = ? ORDER BY number DESC LIMIT {NEWEST}"  # noqa: S608 - no input
    groups += " ORDER BY max(number) DESC LIMIT ?"
    found = []
    for root, count, first, last, names in db.execute(groups, (*given, limit)).fetchall():
        jobs = db.execute(newest, (*given, root)).fetchall()
        found.append(FailureGroup(root, count, first, last, json.loads(names), [job for job, _ in jobs], jobs[0][1]))
    return tuple(found)
