"""The SQL that adds jobs and changes them. Called in the store's thread."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from asyncpipe.service.job_states import FINAL_STATES, JobRecord, JobState, PriorityClass
from asyncpipe.service.store.device_runs import begin_run, end_run
from asyncpipe.service.store.finding import number_of
from asyncpipe.service.store.job_records import JobEvent, write_events

__all__ = ["Admit", "change_state", "insert_job", "update_job"]

Admit: TypeAlias = Callable[[sqlite3.Connection, str | None, Collection[str], Mapping[str, Any]], None]
"""Of a connection, and of a job's owner, the owner's teams and its document."""
_CHANGING = (
    "state", "cause", "updated", "attempts", "step", "snapshot", "asked", "asked_cause", "crashes", "failures",
    "from_step", "placed", "root",
)  # fmt: skip
"""Columns that change, beside the document."""


def insert_job(
    db: sqlite3.Connection,
    job: str,
    document: Mapping[str, Any],
    at: float,
    cause: str,
    **more: object,
) -> int:
    """The number of a new job, queued; ``more`` has further columns."""
    values = {"id": job, "state": JobState.QUEUED, "cause": cause, "submitted": at, "updated": at}
    values |= _of_document(document) | {name: _column(value) for name, value in more.items()}
    places = ", ".join("?" * len(values))
    number = db.execute(f"INSERT INTO jobs ({', '.join(values)}) VALUES ({places})", (*values.values(),)).lastrowid  # noqa: S608 - no input
    assert number is not None
    _add_state(db, number, None, JobState.QUEUED, at, cause, more.get("step", 0))
    return number


def update_job(db: sqlite3.Connection, record: JobRecord) -> JobRecord:
    """``record``, which takes the place of the one with the same id."""
    values = {name: _column(getattr(record, name)) for name in _CHANGING} | _of_document(record.document)
    names = ", ".join(f"{name} = ?" for name in values)
    db.execute(f"UPDATE jobs SET {names} WHERE id = ?", (*values.values(), record.id))  # noqa: S608 - no input
    return record


def _column(value: object) -> object:
    return json.dumps(value) if isinstance(value, tuple) else value


def _of_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """The column of the ``document``, and those by which it is found."""
    return {
        "document": json.dumps(document),
        "name": document["name"],
        "entry": document["entry"],
        "priority_class": document.get("priority_class", PriorityClass.FOREGROUND),
        "tags": json.dumps(document.get("tags", [])),
        "deadline": document.get("deadline"),
    }


def change_state(
    db: sqlite3.Connection, record: JobRecord, to: JobState, at: float, cause: str, ended: float | None = None
) -> JobRecord:
    """The job of ``record`` in the state ``to``. The only place that writes a state.

    ``ended`` is when its run ended, if that was before.
    """
    changes: dict[str, Any] = {}
    if to is JobState.RUNNING:
        changes |= {"attempts": record.attempts + 1, "from_step": None}
    if record.state in FINAL_STATES:
        changes |= {"crashes": 0, "failures": 0}
        if record.deadline is not None and record.deadline <= at:
            changes["document"] = {**record.document, "deadline": None}
    step = _snapshot_step(record) if to is JobState.RUNNING else record.step
    _add_state(db, number_of(db, record.id), record.state, to, at, cause, step)
    changed = replace(record, state=to, cause=cause, updated=at, asked=None, asked_cause=None, **changes)
    if to is JobState.RUNNING:
        begin_run(db, changed, at)
    elif record.state is JobState.RUNNING:
        end_run(db, record, at if ended is None else ended)
    return update_job(db, changed)


def _snapshot_step(record: JobRecord) -> int:
    """The step that the next run of the job goes on from."""
    digits = (record.snapshot or "").rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


def _add_state(
    db: sqlite3.Connection, number: int, from_: JobState | None, to: JobState, at: float, cause: str, step: object
) -> None:
    data = {"from": from_, "to": to, "cause": cause, "step": step}
    write_events(db, number, [JobEvent(0, at, "state", data)])
