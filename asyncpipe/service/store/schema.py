"""The tables of the store.

::

    jobs ◀── events         each change of a job's state, each note and each snapshot, in the order of commits
      ▲
      └───── losses         one row for each training step

    runs                    who had which devices from when to when; stays when its job is deleted

A job's submission is one JSON document, and what is read of a job comes from there. Some of its values are columns as
well, by which jobs are searched and sorted.
"""

from __future__ import annotations

from asyncpipe.service.job_states import JobState

__all__ = ["APPLICATION_ID", "SCHEMA", "UPGRADES", "VERSION"]

APPLICATION_ID = 0x61_70_6A_73
"""Marks the file as a job store ("apjs"), so that databases of other programs are recognised and not changed."""
VERSION = 3
"""Of the tables; an older store is upgraded when a service opens it, and a store of any other version is refused."""

_STATES = ", ".join(f"'{state}'" for state in JobState)

_OF_TEAMS = """
CREATE TABLE runs (
    job TEXT NOT NULL, -- the id of a job, which may have been deleted
    attempt INTEGER NOT NULL,
    owner TEXT,
    devices TEXT NOT NULL, -- a JSON list
    began REAL NOT NULL,
    ended REAL, -- NULL while it runs
    PRIMARY KEY (job, attempt)
) WITHOUT ROWID;
CREATE INDEX runs_by_end ON runs (ended);
CREATE INDEX jobs_by_owner ON jobs (owner, number);
CREATE INDEX jobs_searched ON jobs (number, name, entry, id, cause, tags, updated); -- for lists that look at all jobs
CREATE INDEX jobs_by_teams ON jobs (teams, number);
CREATE INDEX jobs_by_root ON jobs (root, number) WHERE root IS NOT NULL;
"""

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
    document TEXT NOT NULL,
    owner TEXT, -- the user
    teams TEXT NOT NULL DEFAULT '[]', -- a JSON list: those of the user when the job was submitted
    placed TEXT NOT NULL DEFAULT '[]', -- a JSON list of devices
    code TEXT, -- the hash of its entry's content at the submission
    root TEXT -- the root line of its last failure
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
    gradient_norm REAL,
    PRIMARY KEY (job, step)
) WITHOUT ROWID;
CREATE INDEX jobs_by_state ON jobs (state, number);
CREATE INDEX jobs_by_entry ON jobs (entry, number);
CREATE INDEX jobs_by_name ON jobs (name, number);
CREATE INDEX jobs_by_deadline ON jobs (deadline) WHERE deadline IS NOT NULL;
CREATE INDEX events_by_job ON events (job, sequence);
CREATE INDEX states ON events (sequence) WHERE kind = 'state';
{_OF_TEAMS}
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
"""

UPGRADES = {
    2: f"""
ALTER TABLE jobs ADD COLUMN owner TEXT;
ALTER TABLE jobs ADD COLUMN teams TEXT NOT NULL DEFAULT '[]';
ALTER TABLE jobs ADD COLUMN placed TEXT NOT NULL DEFAULT '[]';
ALTER TABLE jobs ADD COLUMN code TEXT;
ALTER TABLE jobs ADD COLUMN root TEXT;
ALTER TABLE losses ADD COLUMN gradient_norm REAL;
{_OF_TEAMS}
PRAGMA user_version = 3;
"""
}
"""By version, what makes the tables of the next one."""
