"""The SQL that reads jobs: one job, lists of jobs, and which job a text means. Called in the store's thread.

Jobs are ordered by their number, which counts submissions; clients see ids only. A list of some states or of an entry
takes as long in a store of a hundred thousand jobs as in an empty one; a search by tag, text or time looks at all jobs,
which takes about 100 ms.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection
from dataclasses import dataclass
from sys import intern
from typing import Any, NamedTuple

from asyncpipe.errors import OptionError
from asyncpipe.service.access import Whose
from asyncpipe.service.job_states import MAX_NAME, JobRecord, JobState, is_tag
from asyncpipe.service.store.store_errors import MOST_CANDIDATES, AmbiguousJobError, JobCandidate, UnknownJobError

__all__ = [
    "JobFilter",
    "JobHead",
    "conditions_of",
    "count_queued",
    "due_jobs",
    "every_job",
    "find_job",
    "is_text",
    "last_failures",
    "list_jobs",
    "number_of",
    "of_whose",
    "resolve_job",
]

_COLUMNS = (
    "id", "document", "state", "cause", "submitted", "updated", "attempts", "step", "snapshot", "asked", "asked_cause",
    "crashes", "failures", "forked_from", "from_step", "owner", "teams", "placed", "code", "root",
)  # fmt: skip
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM jobs"  # noqa: S608 - no input
_GOING_ON = f"state IN ('{JobState.QUEUED}', '{JobState.RUNNING}', '{JobState.PAUSED}')"
_TEAMS = """
WITH RECURSIVE different (listed) AS ( -- few, each found by the index
    SELECT min(teams) FROM jobs
    UNION ALL SELECT (SELECT min(teams) FROM jobs WHERE teams > listed) FROM different WHERE listed IS NOT NULL
) SELECT listed FROM different, json_each(listed) WHERE value IN (SELECT value FROM json_each(?))
"""
"""The lists of teams that jobs have, as far as any of the given teams is on them."""
_SEARCHED = ("name", "entry", "id", "cause", "tags")


class JobFigures(NamedTuple):
    """What lists show of a job beside its record."""

    trained_seconds: float = 0.0
    """How long it has run in all, until now if it still does."""
    waited_seconds: float = 0.0
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs a list has: those that meet all that is given. Raises ``OptionError``."""

    states: frozenset[JobState] | None = None
    """In any of these."""
    entry: str | None = None
    tags: tuple[str, ...] = ()
    """With all of these."""
    text: str | None = None
    """In the name, entry, id, cause or a tag; for ASCII letters, whether upper or lower case."""
    since: float | None = None
    """That have changed, or done a step, at this Unix time or later."""
    owner: str | None = None
    """Of this user."""
    whose: Whose | None = None
    """Of these users and teams, whoever else's jobs there are."""
    root: str | None = None
    """Whose last failure has this root line."""

    def __post_init__(self) -> None:
        for name, value in (("entry", self.entry), ("owner", self.owner), ("text", self.text)):
            if value is not None and not (is_text(value) and len(value) <= MAX_NAME):
                raise OptionError(f"a list's {name} is a text of 1 to {MAX_NAME} characters, not {value!r:.100}")
        if not all(map(is_tag, self.tags)):
            raise OptionError(f"a list's tags are tags of jobs, not {self.tags!r:.100}")
        if self.since is not None and not (isinstance(self.since, int | float) and -1e15 < self.since < 1e15):
            raise OptionError(f"a list's time is a Unix time in seconds, not {self.since!r:.100}")


def find_job(db: sqlite3.Connection, job: str) -> JobRecord:
    """The job of this id. Raises ``UnknownJobError``."""
    row = db.execute(f"{_SELECT} WHERE id = ?", (job,)).fetchone()
    if row is None:
        raise UnknownJobError(job)
    return _record(row)


def number_of(db: sqlite3.Connection, job: str) -> int:
    """The number of the job of this id. Raises ``UnknownJobError``."""
    row = db.execute("SELECT number FROM jobs WHERE id = ?", (job,)).fetchone()
    if row is None:
        raise UnknownJobError(job)
    number: int = row[0]
    return number


def list_jobs(
    db: sqlite3.Connection, wanted: JobFilter, limit: int, after: str | None, *, newest_first: bool
) -> tuple[JobRecord, ...]:
    """At most ``limit`` of the ``wanted`` jobs that follow job ``after`` in the list.

    Each state is a SELECT of its own, with at most ``limit`` rows from the index of that state: SQLite would sort all
    jobs of these states instead.
    """
    order, follows = ("DESC", "<") if newest_first else ("ASC", ">")
    conditions, given = conditions_of(wanted)
    if after is not None:
        conditions.append(f"number {follows} ?")
        given.append(number_of(db, after))
    parts, values = [], list[Any]()
    for state in [None] if wanted.states is None else sorted(wanted.states):
        of_state = [] if state is None else ["state = ?"]
        where = " AND ".join([*of_state, *conditions]) or "1"
        parts.append(f"SELECT * FROM (SELECT number FROM jobs WHERE {where} ORDER BY number {order} LIMIT ?)")  # noqa: S608 - no input
        values += [*([] if state is None else [state]), *given, limit]
    chosen = " UNION ALL ".join(parts) or "NULL"
    rows = db.execute(f"{_SELECT} WHERE number IN ({chosen}) ORDER BY number {order} LIMIT ?", (*values, limit))
    return tuple(map(_record, rows.fetchall()))


def conditions_of(wanted: JobFilter) -> tuple[list[str], list[Any]]:
    """What jobs of ``wanted`` meet beside their state, as SQL and its values."""
    found = [of_whose(wanted.whose)]
    if wanted.entry is not None:
        found.append(("entry = ?", [wanted.entry]))
    if wanted.owner is not None:
        found.append(("owner = ?", [wanted.owner]))
    if wanted.root is not None:
        found.append(("root = ?", [wanted.root]))
    found += [("instr(tags, ?)", [f'"{tag}"']) for tag in wanted.tags]
    if wanted.since is not None:
        found.append(("updated >= ?", [wanted.since]))
    if wanted.text is not None:
        like = "%" + "".join(f"\\{each}" if each in "%_\\" else each for each in wanted.text) + "%"
        columns = [f"{column} LIKE ? ESCAPE '\\'" for column in _SEARCHED]
        found.append((f"({' OR '.join(columns)})", [like] * len(columns)))
    return [clause for clause, _ in found], [value for _, values in found for value in values]


def of_whose(whose: Whose | None) -> tuple[str, list[Any]]:
    """What the jobs of ``whose`` meet, as SQL and its values; ``None``: all jobs."""
    if whose is None:
        return "1", []
    found = f"SELECT number FROM jobs WHERE owner = ? UNION SELECT number FROM jobs WHERE teams IN ({_TEAMS})"  # noqa: S608
    return f"number IN ({found})", [whose.user, json.dumps(whose.teams)]


def count_queued(db: sqlite3.Connection, whose: Whose | None = None) -> int:
    """How many jobs of ``whose``, or of all, are queued."""
    clause, values = of_whose(whose)
    query = f"SELECT count(*) FROM jobs WHERE state = ? AND {clause}"  # noqa: S608 - no input
    return int(db.execute(query, (JobState.QUEUED, *values)).fetchone()[0])


def due_jobs(db: sqlite3.Connection, at: float) -> tuple[tuple[str, ...], float | None]:
    """The jobs that have not ended by their deadline, ``at`` this time; and when the next deadline is."""
    # By that index, or SQLite would look at each job that waits.
    every = f"FROM jobs INDEXED BY jobs_by_deadline WHERE {_GOING_ON} AND deadline"
    due = db.execute(f"SELECT id {every} <= ? ORDER BY number", (at,)).fetchall()
    (later,) = db.execute(f"SELECT min(deadline) {every} > ?", (at,)).fetchone()
    return tuple(job for (job,) in due), later


class JobHead(NamedTuple):
    """What is looked at of all jobs at once: little enough for hundreds of thousands of them."""

    id: str
    name: str
    state: JobState
    updated: float
    snapshot: str | None


def every_job(db: sqlite3.Connection) -> list[JobHead]:
    """The heads of all jobs, oldest first."""
    rows = db.execute("SELECT id, name, state, updated, snapshot FROM jobs ORDER BY number")
    return [JobHead(job, intern(name), JobState(state), *rest) for job, name, state, *rest in rows]


def resolve_job(db: sqlite3.Connection, text: str, whose: Whose | None = None) -> str:
    """The id of the job that ``text`` means: its id, the unique beginning of its id, or its name if no other has it.

    Jobs that are not of ``whose`` do not count. Raises ``UnknownJobError``, and ``AmbiguousJobError`` with the newest
    of the jobs that it may mean.
    """
    clause, values = of_whose(whose)
    if db.execute("SELECT id FROM jobs WHERE id = ?", (text,)).fetchone() is not None:
        return text
    rows = db.execute(
        "SELECT id, name, state FROM jobs WHERE number IN ("  # noqa: S608 - no input
        "SELECT number FROM jobs WHERE name = ? UNION SELECT number FROM jobs WHERE id >= ? AND id < ?"
        f") AND {clause} ORDER BY number DESC LIMIT ?",
        (text, text.lower(), text.lower() + "\U0010ffff", *values, MOST_CANDIDATES + 1),
    ).fetchall()
    if not rows:
        raise UnknownJobError(text)
    if len(rows) > 1:
        raise AmbiguousJobError(text, [JobCandidate(job, name, JobState(state)) for job, name, state in rows])
    found: str = rows[0][0]
    return found


def last_failures(db: sqlite3.Connection, most: int) -> tuple[tuple[str, str, JobState, float], ...]:
    """(id, name, state, since when) of the last ``most`` jobs that are failed or quarantined, oldest first."""
    rows = db.execute(
        "SELECT id, name, state, (SELECT at FROM events WHERE job = number AND kind = 'state'"
        " ORDER BY sequence DESC LIMIT 1) AS since FROM jobs WHERE state IN (?, ?) ORDER BY since DESC LIMIT ?",
        (JobState.FAILED, JobState.QUARANTINED, most),
    ).fetchall()
    return tuple((job, name, JobState(state), at) for job, name, state, at in reversed(rows))


def figures_of(db: sqlite3.Connection, jobs: Collection[str], now: float) -> dict[str, JobFigures]:
    """Those of each of ``jobs``; unknown jobs are left out."""
    rows = db.execute(
        "SELECT id, sum(iif(state = ?2, took, 0)), sum(iif(state = ?3, took, 0)),"  # noqa: S608 - no input
        " (SELECT loss FROM losses WHERE job = number ORDER BY step DESC LIMIT 1) FROM ("
        "SELECT id, number, json_extract(data, '$.to') AS state,"
        " max(coalesce(lead(at) OVER (PARTITION BY job ORDER BY sequence), ?1) - at, 0) AS took"
        " FROM jobs JOIN events ON events.job = jobs.number AND kind = 'state'"
        f" WHERE jobs.id IN ({', '.join('?' * len(jobs))})) GROUP BY id",
        (now, JobState.RUNNING, JobState.QUEUED, *jobs),
    )
    return {job: JobFigures(*figures) for job, *figures in rows.fetchall()}


def is_text(text: object) -> bool:
    """Whether ``text`` can be passed to SQLite, and is not empty."""
    try:
        return isinstance(text, str) and bool(text.encode())
    except UnicodeEncodeError:
        return False


def _record(row: tuple[Any, ...]) -> JobRecord:
    values = dict(zip(_COLUMNS, row, strict=True))
    try:
        asked = values["asked"] and JobState(values["asked"])
        known = {"document": json.loads(values["document"]), "state": JobState(values["state"]), "asked": asked}
        known |= {name: tuple(json.loads(values[name])) for name in ("teams", "placed")}
        return JobRecord(**{**values, **known})
    except ValueError as error:
        raise sqlite3.DataError(f"job {row[0]}: {error}") from error
