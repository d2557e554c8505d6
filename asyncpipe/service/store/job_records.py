"""The SQL of a job's events and losses, which are written in batches. Called in the store's thread.

Steps of a loss curve increase, and each is there once: a batch that begins with an earlier step replaces all rows from
that step on. Numbers come back with the same bits.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any, Literal, NamedTuple

from asyncpipe.service.job_states import JobState, Transition
from asyncpipe.service.store.finding import number_of

__all__ = [
    "EventKind",
    "JobEvent",
    "LossRow",
    "copy_losses",
    "read_events",
    "read_losses",
    "read_transitions",
    "spread_losses",
    "write_events",
    "write_losses",
]

EventKind = Literal["state", "note", "snapshot", "step"]

MOST_NOTES = 2000
"""Notes and snapshots of one job that are kept; states are kept for ever."""


class LossRow(NamedTuple):
    """One training step of a job."""

    step: int
    """From 1."""
    loss: float
    learning_rate: float
    seconds: float
    tokens: int
    gradient_norm: float = nan
    """Of all gradients together, before clipping; NaN where it is not known."""


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One thing that happened to a job."""

    id: int
    """Increases from event to event; a follower continues after it. A step has the number of the event before it. 0
    before the event is in the store."""
    at: float
    """Unix time."""
    kind: EventKind
    data: Mapping[str, Any]
    """``state``: from, to, cause, step. ``note``: level, text. ``snapshot``: step, name. ``step``: the fields of
    ``LossRow``, whose numbers may be infinite or NaN."""


def write_events(db: sqlite3.Connection, number: int, events: Sequence[JobEvent]) -> None:
    """Add ``events`` of the job with this ``number``, and remove the oldest notes that are too many."""
    rows = [(number, event.at, event.kind, json.dumps(event.data)) for event in events]
    db.executemany("INSERT INTO events (job, at, kind, data) VALUES (?, ?, ?, ?)", rows)
    if any(event.kind != "state" for event in events):
        db.execute(
            "DELETE FROM events WHERE job = ?1 AND kind != 'state' AND sequence <= (SELECT sequence FROM events"
            " WHERE job = ?1 AND kind != 'state' ORDER BY sequence DESC LIMIT 1 OFFSET ?2)",
            (number, MOST_NOTES),
        )


def write_losses(db: sqlite3.Connection, number: int, losses: Sequence[LossRow]) -> None:
    """Add ``losses``, whose steps increase, to those of the job with this ``number``."""
    if losses:
        db.execute("DELETE FROM losses WHERE job = ? AND step >= ?", (number, losses[0].step))
        db.executemany("INSERT INTO losses VALUES (?, ?, ?, ?, ?, ?, ?)", [(number, *row) for row in losses])


def read_events(
    db: sqlite3.Connection, job: str, after: int, limit: int, kinds: str = "state note snapshot"
) -> list[JobEvent]:
    """At most ``limit`` events of ``job`` that follow event ``after``. Raises ``UnknownJobError``."""
    rows = db.execute(
        "SELECT sequence, at, kind, data FROM events"
        " WHERE job = ? AND sequence > ? AND instr(?, kind) ORDER BY sequence LIMIT ?",
        (number_of(db, job), after, kinds, limit),
    )
    return [JobEvent(sequence, at, kind, json.loads(data)) for sequence, at, kind, data in rows.fetchall()]


def read_transitions(db: sqlite3.Connection, job: str) -> tuple[Transition, ...]:
    """All transitions of ``job``, its submission first. Raises ``UnknownJobError``."""
    return tuple(
        Transition(
            event.id,
            job,
            event.data["from"] and JobState(event.data["from"]),
            JobState(event.data["to"]),
            event.at,
            event.data["cause"],
            event.data.get("step"),
        )
        for event in read_events(db, job, 0, -1, "state")
    )


def read_losses(db: sqlite3.Connection, job: str, after: int, limit: int) -> list[LossRow]:
    """At most ``limit`` steps of ``job`` that follow step ``after``. Raises ``UnknownJobError``."""
    return _losses(db, number_of(db, job), "step > ? ORDER BY step LIMIT ?", after, limit)


def spread_losses(db: sqlite3.Connection, job: str, most: int) -> list[LossRow]:
    """At most ``most`` steps of ``job``, evenly spread from its first to its last. Raises ``UnknownJobError``."""
    number = number_of(db, job)
    first, last = db.execute("SELECT min(step), max(step) FROM losses WHERE job = ?", (number,)).fetchone()
    if first is None:
        return []
    steps = {first + (last - first) * index // max(most - 1, 1) for index in range(most)}
    return _losses(db, number, f"step IN ({', '.join(map(str, sorted(steps)))}) ORDER BY step")


def copy_losses(db: sqlite3.Connection, job: str, to: int, until: int) -> None:
    """Begin the losses of the job with the number ``to`` with those of ``job`` up to step ``until``."""
    write_losses(db, to, _losses(db, number_of(db, job), "step <= ? ORDER BY step", until))


def _losses(db: sqlite3.Connection, number: int, which: str, *values: int) -> list[LossRow]:
    rows = db.execute(
        f"SELECT {', '.join(LossRow._fields)} FROM losses WHERE job = ? AND {which}",  # noqa: S608
        (number, *values),
    )
    return [LossRow._make(nan if value is None else value for value in row) for row in rows.fetchall()]
