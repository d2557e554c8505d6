"""The tables of the store.

::

    jobs ◀── specs         what was submitted, as JSON: beside the job, so that searching many jobs reads little
      ▲ ◀── transitions    each change of a job's state
      └──── job_tags       a row for each tag of a job, to find jobs by tag
    tokens                 who may use the API; a hash of each secret
"""

from __future__ import annotations

from asyncpipe.service.job_states import JobState, PriorityClass

__all__ = ["APPLICATION_ID", "SCHEMA", "VERSION"]

APPLICATION_ID = 0x61_70_6A_73
"""Marks the file as a job store ("apjs"), so that databases of other programs are recognised and not changed."""
VERSION = 1
"""Of the tables; a store of another version is refused."""

_STATES = ", ".join(f"'{state}'" for state in JobState)
_CLASSES = ", ".join(f"'{each}'" for each in PriorityClass)

SCHEMA = f"""
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of submission, also when the clock is set back
    id TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    entry TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ({_STATES})),
    cause TEXT NOT NULL,
    submitted REAL NOT NULL,
    updated REAL NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    crashes INTEGER NOT NULL DEFAULT 0, -- how often the service died while the job ran, since its snapshot
    step INTEGER NOT NULL DEFAULT 0,
    snapshot TEXT,
    from_step INTEGER, -- a retried job goes on from this older snapshot; newer ones are set aside when it begins
    asked TEXT CHECK (asked IN ({_STATES})), -- what a running job was asked to become
    asked_cause TEXT,
    idempotency_key TEXT UNIQUE,
    forked_from TEXT, -- the id of another job; it may be gone
    -- These hold in place of the specification's:
    schedule TEXT,
    priority_class TEXT NOT NULL CHECK (priority_class IN ({_CLASSES})),
    weight REAL NOT NULL CHECK (weight > 0),
    tags TEXT NOT NULL DEFAULT '[]', -- as JSON
    deadline REAL
);
CREATE TABLE specs (job INTEGER PRIMARY KEY REFERENCES jobs (number) ON DELETE CASCADE, spec TEXT NOT NULL);
CREATE TABLE transitions (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE,
    from_state TEXT CHECK (from_state IN ({_STATES})),
    to_state TEXT NOT NULL CHECK (to_state IN ({_STATES})),
    at REAL NOT NULL,
    cause TEXT NOT NULL
);
CREATE TABLE job_tags (
    tag TEXT NOT NULL,
    job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE,
    PRIMARY KEY (tag, job)
) WITHOUT ROWID;
CREATE TABLE tokens (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    role TEXT NOT NULL,
    hash TEXT NOT NULL UNIQUE,
    created REAL NOT NULL,
    last_used REAL,
    revoked REAL
);
CREATE INDEX jobs_by_state ON jobs (state, number);
CREATE INDEX jobs_by_entry ON jobs (entry, number);
CREATE INDEX jobs_by_name ON jobs (name, number);
CREATE INDEX jobs_by_deadline ON jobs (deadline) WHERE deadline IS NOT NULL;
CREATE INDEX transitions_by_job ON transitions (job, sequence);
CREATE INDEX job_tags_by_job ON job_tags (job);
CREATE UNIQUE INDEX tokens_in_use ON tokens (name) WHERE revoked IS NULL;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
"""
