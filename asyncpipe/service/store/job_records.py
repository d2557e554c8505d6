"""The SQL of a job's events and losses, which are written in batches. Called in the store's thread.

Steps of a loss curve increase, and each is there once: a batch that begins with an earlier step replaces all rows from
that step on. Numbers come back with the same bits.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Literal, NamedTuple

from asyncpipe.service.job_states import JSON, JobState, Transition
from asyncpipe.service.store.finding import number_of

__all__ = [
    "EventKind",
    "JobEvent",
    "LossRow",
    "NewEvent",
    "add_state",
    "copy_losses",
    "event_data",
    "read_events",
    "read_losses",
    "read_transitions",
    "spread_losses",
    "write_records",
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


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One thing that happened to a job."""

    id: int
    """Increases from event to event; a follower continues after it. A step has the number of the event before it."""
    at: float
    """Unix time."""
    kind: EventKind
    data: Mapping[str, JSON]
    """``state``: from, to, cause. ``note``: level, text. ``snapshot``: step, name. ``step``: the fields of
    ``LossRow``, whose numbers may be infinite or NaN."""


class NewEvent(NamedTuple):
    """A note or a snapshot that is to be written."""

    at: float
    kind: Literal["note", "snapshot"]
    number: int
    """The level of ``logging``, or the step."""
    text: str


def event_data(event: NewEvent) -> Mapping[str, JSON]:
    """The data of the ``JobEvent`` for a note or a snapshot."""
    if event.kind == "note":
        return {"level": event.number, "text": event.text}
    return {"step": event.number, "name": event.text}


def add_state(
    connection: sqlite3.Connection, number: int, from_: JobState | None, to: JobState, at: float, cause: str
) -> None:
    """Record a transition of the job with this ``number``."""
    connection.execute(
        "INSERT INTO events (job, at, kind, from_state, to_state, text) VALUES (?, ?, 'state', ?, ?, ?)",
        (number, at, from_, to, cause),
    )


def write_records(
    connection: sqlite3.Connection, job: str, losses: Sequence[LossRow], events: Sequence[NewEvent]
) -> None:
    """Write ``losses``, whose steps increase, and ``events``. Raises ``UnknownJobError``."""
    number = number_of(connection, job)
    if losses:
        connection.execute("DELETE FROM losses WHERE job = ? AND step >= ?", (number, losses[0].step))
        connection.executemany("INSERT INTO losses VALUES (?, ?, ?, ?, ?, ?)", [(number, *row) for row in losses])
    if events:
        connection.executemany(
            "INSERT INTO events (job, at, kind, number, text) VALUES (?, ?, ?, ?, ?)",
            [(number, *event) for event in events],
        )
        connection.execute(
            "DELETE FROM events WHERE job = ?1 AND kind != 'state' AND sequence <= (SELECT sequence FROM events"
            " WHERE job = ?1 AND kind != 'state' ORDER BY sequence DESC LIMIT 1 OFFSET ?2)",
            (number, MOST_NOTES),
        )


def read_events(connection: sqlite3.Connection, job: str, after: int, limit: int) -> list[JobEvent]:
    """At most ``limit`` events of ``job`` that follow event ``after``. Raises ``UnknownJobError``."""
    rows = connection.execute(
        "SELECT sequence, at, kind, from_state, to_state, number, text FROM events"
        " WHERE job = ? AND sequence > ? ORDER BY sequence LIMIT ?",
        (number_of(connection, job), after, limit),
    )
    found = []
    for sequence, at, kind, from_, to, number, text in rows.fetchall():
        is_state = kind == "state"
        data = {"from": from_, "to": to, "cause": text} if is_state else event_data(NewEvent(at, kind, number, text))
        found.append(JobEvent(sequence, at, kind, data))
    return found


def read_transitions(connection: sqlite3.Connection, job: str) -> tuple[Transition, ...]:
    """All transitions of ``job``, its submission first. Raises ``UnknownJobError``."""
    rows = connection.execute(
        "SELECT sequence, from_state, to_state, at, text FROM events"
        " WHERE job = ? AND kind = 'state' ORDER BY sequence",
        (number_of(connection, job),),
    )
    return tuple(
        Transition(sequence, job, from_ and JobState(from_), JobState(to), at, cause)
        for sequence, from_, to, at, cause in rows.fetchall()
    )


def read_losses(connection: sqlite3.Connection, job: str, after: int, limit: int) -> list[LossRow]:
    """At most ``limit`` steps of ``job`` that follow step ``after``. Raises ``UnknownJobError``."""
    return _losses(connection, job, "step > ? ORDER BY step LIMIT ?", (after, limit))


def spread_losses(connection: sqlite3.Connection, job: str, most: int) -> list[LossRow]:
    """At most ``most`` steps of ``job``, evenly spread from its first to its last. Raises ``UnknownJobError``."""
    first, last = connection.execute(
        "SELECT min(step), max(step) FROM losses WHERE job = ?", (number_of(connection, job),)
    ).fetchone()
    if first is None:
        return []
    steps = {first + (last - first) * index // max(most - 1, 1) for index in range(most)}
    return _losses(connection, job, f"step IN ({', '.join(map(str, sorted(steps)))}) ORDER BY step", ())


def copy_losses(connection: sqlite3.Connection, job: str, to: str, until: int) -> None:
    """Begin the losses of job ``to`` with those of ``job`` up to step ``until``."""
    connection.execute(
        "INSERT INTO losses SELECT ?, step, loss, learning_rate, seconds, tokens FROM losses"
        " WHERE job = ? AND step <= ?",
        (number_of(connection, to), number_of(connection, job), until),
    )


def _losses(connection: sqlite3.Connection, job: str, which: str, values: tuple[int, ...]) -> list[LossRow]:
    rows = connection.execute(
        f"SELECT step, loss, learning_rate, seconds, tokens FROM losses WHERE job = ? AND {which}",  # noqa: S608
        (number_of(connection, job), *values),
    )
    return [LossRow._make(nan if value is None else value for value in row) for row in rows.fetchall()]
