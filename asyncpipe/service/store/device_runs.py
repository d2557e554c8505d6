"""The SQL of runs: who had which devices from when to when. Called in the store's thread.

Runs outlive their jobs: what a user has used of the devices stays true when the jobs are deleted. ``KEPT_DAYS`` after
its end a run is deleted.
"""

from __future__ import annotations

import json
import sqlite3
from typing import NamedTuple

from asyncpipe.service.job_states import JobRecord

__all__ = ["DeviceRun", "begin_run", "end_run", "read_runs"]

KEPT_DAYS = 90


class DeviceRun(NamedTuple):
    """A run of a job on devices. Times are Unix times in seconds."""

    job: str
    attempt: int
    """From 1."""
    owner: str | None
    devices: tuple[str, ...]
    began: float
    ended: float | None
    """``None`` while it runs."""


def begin_run(db: sqlite3.Connection, record: JobRecord, at: float) -> None:
    """Record that the job of ``record``, which has begun its run, has its devices ``at`` this time."""
    devices = json.dumps(record.placed or record.devices)
    values = (record.id, record.attempts, record.owner, devices, at)
    db.execute("INSERT OR REPLACE INTO runs (job, attempt, owner, devices, began) VALUES (?, ?, ?, ?, ?)", values)


def end_run(db: sqlite3.Connection, record: JobRecord, at: float) -> None:
    """Record that the run of the job of ``record`` has ended, and delete the runs that are too old."""
    db.execute("UPDATE runs SET ended = ? WHERE job = ? AND attempt = ?", (at, record.id, record.attempts))
    db.execute("DELETE FROM runs WHERE ended < ?", (at - KEPT_DAYS * 86400,))


def read_runs(db: sqlite3.Connection, since: float) -> list[DeviceRun]:
    """The runs that ended at ``since`` or later, or have not ended; the oldest first."""
    rows = db.execute(
        "SELECT job, attempt, owner, devices, began, ended FROM runs WHERE ended IS NULL OR ended >= ? ORDER BY began",
        (since,),
    )
    return [DeviceRun._make((*row[:3], tuple(json.loads(row[3])), *row[4:])) for row in rows.fetchall()]
