"""The tables of the store.

::

    jobs ◀── events         each change of a job's state, each note and each snapshot, in the order of commits
      ▲
      └───── losses         one row for each training step

A job's submission is one JSON document, and what is read of a job comes from there. Some of its values are columns as
well, by which jobs are searched and sorted.
"""

from __future__ import annotations

from asyncpipe.service.job_states import JobState

__all__ = ["APPLICATION_ID", "SCHEMA", "VERSION"]

APPLICATION_ID = 0x61_70_6A_73
"""Marks the file as a job store ("apjs"), so that databases of other programs are recognised and not changed."""
VERSION = 2
"""Of the tables; a store of another version is refused."""

_STATES = ", ".join(f"'{state}'" for state in JobState)

SCHEMA = f"""
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of submission, also when the clock is set back
    id TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL, -- from the document, as the next four: what jobs are found by
    entry TEXT NOT NULL,
    priority_class TEXT NOT NULL,
    tags TEXT NOT NULL, -- a JSON list
    deadline REAL,
    state TEXT NOT NULL CHECK (state IN ({_STATES})),
    cause TEXT NOT NULL,
    submitted REAL NOT NULL,
    updated REAL NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    step INTEGER NOT NULL DEFAULT 0,
    snapshot TEXT,
    asked TEXT CHECK (asked IN ({_STATES})), -- what a running job was asked to become
    asked_cause TEXT,
    crashes INTEGER NOT NULL DEFAULT 0, -- how often the service died while the job ran, since its snapshot
    failures INTEGER NOT NULL DEFAULT 0, -- of its runs in a row, since its snapshot
    forked_from TEXT, -- the id of another job, which may have been deleted
    from_step INTEGER, -- a retried job goes on from this older snapshot; newer ones are set aside when it begins
    idempotency_key TEXT UNIQUE,
    digest TEXT, -- of what was submitted with that key
    document TEXT NOT NULL
);
CREATE TABLE events (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE,
    at REAL NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('state', 'note', 'snapshot')),
    data TEXT NOT NULL -- a JSON object
);
CREATE TABLE losses (
    job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE,
    step INTEGER NOT NULL,
    loss REAL, -- NULL stands for NaN, which SQLite does not have
    learning_rate REAL,
    seconds REAL,
    tokens INTEGER NOT NULL,
    PRIMARY KEY (job, step)
) WITHOUT ROWID;
CREATE INDEX jobs_by_state ON jobs (state, number);
CREATE INDEX jobs_by_entry ON jobs (entry, number);
CREATE INDEX jobs_by_name ON jobs (name, number);
CREATE INDEX jobs_by_deadline ON jobs (deadline) WHERE deadline IS NOT NULL;
CREATE INDEX events_by_job ON events (job, sequence);
CREATE INDEX states ON events (sequence) WHERE kind = 'state';
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
"""
