"""The tables of the store, as the migrations that make them: a store of any age is brought to the newest schema.

::

    jobs ◀── specs         what was submitted, as JSON: beside the job, so that searching many jobs reads little
      ▲ ◀── transitions    each change of a job's state
      ├──── job_tags       a row for each tag of a job, to find jobs by tag
      └──── job_waits      a row for each job that a job still waits for (`after`); gone when that one has finished
    tokens                 who may use the API; a hash of each secret

Texts of states and classes are spelled out here and not taken from the code: a migration makes the same tables for
ever.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

__all__ = ["APPLICATION_ID", "MIGRATIONS"]

APPLICATION_ID = 0x61_70_6A_73
"""Marks the file as a job store ("apjs"), so that databases of other programs are recognised and not changed."""


def _first_schema(connection: sqlite3.Connection) -> None:
    states = "'queued', 'running', 'paused', 'finished', 'failed', 'cancelled'"
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(
        f"""CREATE TABLE jobs (
            number INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of submission, also when the clock is set back
            id TEXT NOT NULL UNIQUE,
            spec TEXT NOT NULL,
            priority_class TEXT NOT NULL CHECK (priority_class IN ('foreground', 'background')),
            state TEXT NOT NULL CHECK (state IN ({states})),
            cause TEXT NOT NULL,
            submitted REAL NOT NULL,
            updated REAL NOT NULL,
            attempts INTEGER NOT NULL DEFAULT 0,
            step INTEGER NOT NULL DEFAULT 0,
            snapshot TEXT,
            asked TEXT CHECK (asked IN ({states})), -- what a running job was asked to become
            asked_cause TEXT,
            schedule TEXT, -- replaces that of the specification
            idempotency_key TEXT UNIQUE
        )"""
    )
    connection.execute("CREATE INDEX jobs_by_state ON jobs (state, number)")
    connection.execute(
        f"""CREATE TABLE transitions (
            sequence INTEGER PRIMARY KEY AUTOINCREMENT,
            job INTEGER NOT NULL REFERENCES jobs (number),
            from_state TEXT CHECK (from_state IN ({states})),
            to_state TEXT NOT NULL CHECK (to_state IN ({states})),
            at REAL NOT NULL,
            cause TEXT NOT NULL
        )"""
    )
    connection.execute("CREATE INDEX transitions_by_job ON transitions (job, sequence)")


_STATES = "'queued', 'running', 'paused', 'finished', 'failed', 'cancelled', 'quarantined'"

_JOBS_2 = f"""CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of submission, also when the clock is set back
    id TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    entry TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ({_STATES})),
    cause TEXT NOT NULL,
    submitted REAL NOT NULL,
    updated REAL NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    crashes INTEGER NOT NULL DEFAULT 0, -- ends of the service that nobody asked for, while it ran, since its snapshot
    step INTEGER NOT NULL DEFAULT 0,
    snapshot TEXT,
    asked TEXT CHECK (asked IN ({_STATES})), -- what a running job was asked to become
    asked_cause TEXT,
    idempotency_key TEXT UNIQUE,
    group_name TEXT, -- of jobs that were submitted together
    forked_from TEXT, -- the id of another job; it may be gone
    -- These hold in place of the specification's:
    schedule TEXT,
    priority_class TEXT NOT NULL CHECK (priority_class IN ('foreground', 'background')),
    weight REAL NOT NULL CHECK (weight > 0),
    tags TEXT NOT NULL DEFAULT '[]', -- as JSON
    deadline REAL
)"""

_COPY_2 = """INSERT INTO jobs (
    number, id, name, entry, state, cause, submitted, updated, attempts, step, snapshot, asked, asked_cause,
    idempotency_key, schedule, priority_class, weight)
SELECT
    number, id, json_extract(spec, '$.name'), json_extract(spec, '$.entry'), state, cause, submitted, updated, attempts,
    step, snapshot, asked, asked_cause, idempotency_key, schedule, priority_class, json_extract(spec, '$.weight')
FROM old_jobs ORDER BY number"""


def _second_schema(connection: sqlite3.Connection) -> None:
    """Tags, groups, deadlines, quarantine, tokens. SQLite cannot change a CHECK, so both tables are copied."""
    for statement in (
        "ALTER TABLE transitions RENAME TO old_transitions",
        "ALTER TABLE jobs RENAME TO old_jobs",
        "DROP INDEX jobs_by_state",
        "DROP INDEX transitions_by_job",
        _JOBS_2,
        "CREATE TABLE specs (job INTEGER PRIMARY KEY REFERENCES jobs (number) ON DELETE CASCADE, spec TEXT NOT NULL)",
        f"""CREATE TABLE transitions (
            sequence INTEGER PRIMARY KEY AUTOINCREMENT,
            job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE,
            from_state TEXT CHECK (from_state IN ({_STATES})),
            to_state TEXT NOT NULL CHECK (to_state IN ({_STATES})),
            at REAL NOT NULL,
            cause TEXT NOT NULL
        )""",
        """CREATE TABLE job_tags (
            tag TEXT NOT NULL,
            job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE,
            PRIMARY KEY (tag, job)
        ) WITHOUT ROWID""",
        """CREATE TABLE job_waits (
            awaited TEXT NOT NULL, -- the id of another job
            job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE,
            PRIMARY KEY (awaited, job)
        ) WITHOUT ROWID""",
        """CREATE TABLE tokens (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            name TEXT NOT NULL,
            role TEXT NOT NULL,
            hash TEXT NOT NULL UNIQUE,
            created REAL NOT NULL,
            last_used REAL,
            revoked REAL
        )""",
        _COPY_2,
        "INSERT INTO specs (job, spec) SELECT number, spec FROM old_jobs ORDER BY number",
        "INSERT INTO transitions SELECT sequence, job, from_state, to_state, at, cause FROM old_transitions",
        "DROP TABLE old_transitions",
        "DROP TABLE old_jobs",
        "CREATE INDEX jobs_by_state ON jobs (state, number)",
        "CREATE INDEX jobs_by_entry ON jobs (entry, number)",
        "CREATE INDEX jobs_by_name ON jobs (name, number)",
        "CREATE INDEX jobs_by_group ON jobs (group_name, number) WHERE group_name IS NOT NULL",
        "CREATE INDEX jobs_by_deadline ON jobs (deadline) WHERE deadline IS NOT NULL",
        "CREATE INDEX transitions_by_job ON transitions (job, sequence)",
        "CREATE INDEX job_tags_by_job ON job_tags (job)",
        "CREATE INDEX job_waits_by_job ON job_waits (job)",
        "CREATE UNIQUE INDEX tokens_in_use ON tokens (name) WHERE revoked IS NULL",
    ):
        connection.execute(statement)


def _third_schema(connection: sqlite3.Connection) -> None:
    """A job that is retried may go on from an older snapshot; the newer ones are set aside when it begins."""
    connection.execute("ALTER TABLE jobs ADD COLUMN from_step INTEGER")


MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (_first_schema, _second_schema, _third_schema)
"""Migration n (from 0) brings a store from schema n to n + 1. Never change an old one; append new ones."""
