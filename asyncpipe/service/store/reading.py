"""The SQL that reads the job store: one job, lists of jobs, and which job a text means.

Jobs are ordered by their number, which counts submissions; clients see ids only. Lists take as long in a store of a
hundred thousand jobs as in an empty one, except for a search by text or time, which looks at all jobs (some 50 ms).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from asyncpipe.errors import AsyncpipeError, OptionError
from asyncpipe.service.job_states import (
    MAX_NAME,
    JobRecord,
    JobSpec,
    JobState,
    PriorityClass,
    Transition,
    is_tag,
)

__all__ = [
    "FROM",
    "AmbiguousJobError",
    "JobCandidate",
    "JobFilter",
    "PastDeadlineError",
    "UnknownJobError",
    "count_jobs",
    "find_job",
    "history_of",
    "jobs_due",
    "list_jobs",
    "newest_change",
    "number_and_state",
    "resolve_job",
    "trained_seconds",
]

MOST_CANDIDATES = 10
_NAMES = (
    "id, spec, state, cause, submitted, updated, attempts, step, snapshot, asked, asked_cause, schedule, crashes,"
    " forked_from, from_step, priority_class, weight, tags, deadline"
)
FROM = "FROM jobs JOIN specs ON specs.job = jobs.number"
"""Of statements that read jobs with their specifications."""
_SEARCHED = ("name", "entry", "id", "cause", "tags")


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

    def __post_init__(self) -> None:
        for name, value in (("entry", self.entry), ("text", self.text)):
            if value is not None and not (_is_text(value) and len(value) <= MAX_NAME):
                raise OptionError(f"a list's {name} is a text of 1 to {MAX_NAME} characters, not {value!r:.100}")
        if not all(map(is_tag, self.tags)):
            raise OptionError(f"a list's tags are tags of jobs, not {self.tags!r:.100}")
        if self.since is not None and not (isinstance(self.since, int | float) and -1e15 < self.since < 1e15):
            raise OptionError(f"a list's time is a Unix time in seconds, not {self.since!r:.100}")


class UnknownJobError(AsyncpipeError, LookupError):
    """The store has no job of this id."""

    def __init__(self, job: str) -> None:
        super().__init__(f"there is no job {job!r:.100}; ids are given when jobs are submitted, and listed")
        self.job = job

    def __reduce__(self) -> tuple[type[UnknownJobError], tuple[str]]:
        return type(self), (self.job,)


class PastDeadlineError(AsyncpipeError, ValueError):
    """A job was submitted with a deadline that has passed."""

    def __init__(self, deadline: float) -> None:
        super().__init__(f"the deadline {deadline:.0f} has passed; give a Unix time that is still to come")
        self.deadline = deadline

    def __reduce__(self) -> tuple[type[PastDeadlineError], tuple[float]]:
        return type(self), (self.deadline,)


class JobCandidate(NamedTuple):
    """A job that a text may mean."""

    id: str
    name: str
    state: JobState


class AmbiguousJobError(AsyncpipeError, LookupError):
    """A name, or the beginning of an id, that several jobs have; ``candidates`` are the newest of them."""

    def __init__(self, text: str, candidates: Sequence[JobCandidate]) -> None:
        shown = ", ".join(f"{each.id} ({each.name}, {each.state})" for each in candidates[:MOST_CANDIDATES])
        more = " and others" if len(candidates) > MOST_CANDIDATES else ""
        super().__init__(f"{text!r:.100} may mean any of these jobs: {shown}{more}; name one of them by its id")
        self.text = text
        self.candidates = tuple(candidates[:MOST_CANDIDATES])

    def __reduce__(self) -> tuple[type[AmbiguousJobError], tuple[str, tuple[JobCandidate, ...]]]:
        return type(self), (self.text, self.candidates)


def find_job(connection: sqlite3.Connection, job: str) -> JobRecord:
    """The job of this id. Raises ``UnknownJobError``."""
    row = connection.execute(f"SELECT {_NAMES} {FROM} WHERE id = ?", (job,)).fetchone()
    if row is None:
        raise UnknownJobError(job)
    return _record(row)


def list_jobs(
    connection: sqlite3.Connection,
    wanted: JobFilter,
    limit: int,
    after: str | None,
    *,
    newest_first: bool,
) -> tuple[JobRecord, ...]:
    """At most ``limit`` of the ``wanted`` jobs that follow job ``after`` in the list."""
    number = None if after is None else number_and_state(connection, after)[0]
    chosen, values = _chosen(wanted, number, limit, newest_first=newest_first)
    order = "DESC" if newest_first else "ASC"
    rows = connection.execute(
        f"SELECT {_NAMES} {FROM} WHERE number IN ({chosen}) ORDER BY number {order}",
        values,
    )
    return tuple(map(_record, rows.fetchall()))


def _chosen(wanted: JobFilter, after: int | None, limit: int, *, newest_first: bool) -> tuple[str, list[Any]]:
    """The SELECT of the numbers of a list, and its values.

    Each state has a part of its own, with at most ``limit`` rows from the index of that state: SQLite would sort all
    jobs of these states instead.
    """
    order, follows = ("DESC", "<") if newest_first else ("ASC", ">")
    parts, values = [], list[Any]()
    for state in [None] if wanted.states is None else sorted(wanted.states):
        clause, given = _conditions(wanted, state)
        if after is not None:
            clause += f" AND number {follows} ?"
            given.append(after)
        part = f"SELECT number FROM jobs WHERE {clause} ORDER BY number {order} LIMIT ?"  # noqa: S608 - no input
        parts.append(f"SELECT number FROM ({part})")  # noqa: S608 - no input
        values += [*given, limit]
    if not parts:
        return "SELECT number FROM jobs WHERE 0", []
    return f"{' UNION ALL '.join(parts)} ORDER BY 1 {order} LIMIT ?", [*values, limit]


def _conditions(wanted: JobFilter, state: JobState | None) -> tuple[str, list[Any]]:
    """What jobs of ``wanted`` meet, as SQL and its values; of ``state`` only, if one is given."""
    found: list[tuple[str, list[Any]]] = []
    if state is not None:
        found.append(("state = ?", [state]))
    if wanted.entry is not None:
        found.append(("entry = ?", [wanted.entry]))
    tagged = "number IN (SELECT job FROM job_tags WHERE tag = ?)"
    found += [(tagged, [tag]) for tag in wanted.tags]
    if wanted.since is not None:
        found.append(("updated >= ?", [wanted.since]))
    if wanted.text is not None:
        like = "%" + "".join(f"\\{each}" if each in "%_\\" else each for each in wanted.text) + "%"
        columns = [f"{column} LIKE ? ESCAPE '\\'" for column in _SEARCHED]
        found.append((f"({' OR '.join(columns)})", [like] * len(columns)))
    return " AND ".join(["1", *(clause for clause, _ in found)]), [value for _, values in found for value in values]


def resolve_job(connection: sqlite3.Connection, text: str) -> str:
    """The id of the job that ``text`` means: its id, the unique beginning of its id, or its name if no other has it.

    Raises ``UnknownJobError``, and ``AmbiguousJobError`` with the newest of the jobs that it may mean.
    """
    exact = connection.execute("SELECT id FROM jobs WHERE id = ?", (text,)).fetchone()
    if exact is not None:
        return text
    rows = connection.execute(
        "SELECT id, name, state FROM jobs WHERE number IN ("
        "SELECT number FROM jobs WHERE name = ? UNION SELECT number FROM jobs WHERE id >= ? AND id < ?"
        ") ORDER BY number DESC LIMIT ?",
        (text, text.lower(), text.lower() + "\U0010ffff", MOST_CANDIDATES + 1),
    ).fetchall()
    if not rows:
        raise UnknownJobError(text)
    if len(rows) > 1:
        raise AmbiguousJobError(text, [JobCandidate(job, name, JobState(state)) for job, name, state in rows])
    found: str = rows[0][0]
    return found


def jobs_due(connection: sqlite3.Connection, at: float) -> tuple[tuple[str, ...], float | None]:
    """The jobs that have not ended and whose deadline is ``at`` this time or before, and the next one after it."""
    going = f"state IN ('{JobState.QUEUED}', '{JobState.RUNNING}', '{JobState.PAUSED}')"
    due = connection.execute(f"SELECT id FROM jobs WHERE deadline <= ? AND {going} ORDER BY number", (at,))  # noqa: S608 - no input
    jobs = tuple(job for (job,) in due.fetchall())
    (following,) = connection.execute(
        f"SELECT min(deadline) FROM jobs WHERE deadline > ? AND {going}",  # noqa: S608 - no input
        (at,),
    ).fetchone()
    return jobs, following


def count_jobs(connection: sqlite3.Connection) -> dict[JobState, int]:
    """How many jobs are in each state, 0 included."""
    counts = connection.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall()
    return dict.fromkeys(JobState, 0) | {JobState(state): count for state, count in counts}


def newest_change(connection: sqlite3.Connection) -> int:
    """The number of the newest transition of any job; 0 if there is none. While it stays, no job has another state."""
    number: int = connection.execute("SELECT coalesce(max(sequence), 0) FROM transitions").fetchone()[0]
    return number


def trained_seconds(connection: sqlite3.Connection, jobs: Collection[str], now: float) -> dict[str, float]:
    """How long each of ``jobs`` has been running in all, until ``now`` if it still does; unknown jobs are left out."""
    rows = connection.execute(
        "SELECT id, sum(iif(to_state = ?, max(coalesce(until, ?) - at, 0), 0)) FROM ("  # noqa: S608 - no input
        "SELECT jobs.id AS id, to_state, at, lead(at) OVER (PARTITION BY job ORDER BY sequence) AS until"
        " FROM jobs JOIN transitions ON transitions.job = jobs.number"
        f" WHERE jobs.id IN ({', '.join('?' * len(jobs))})) GROUP BY id",
        (JobState.RUNNING, now, *jobs),
    )
    return dict(rows.fetchall())


def history_of(connection: sqlite3.Connection, job: str) -> tuple[Transition, ...]:
    """All transitions of ``job``, its submission first. Raises ``UnknownJobError``."""
    number, _ = number_and_state(connection, job)
    rows = connection.execute(
        "SELECT sequence, from_state, to_state, at, cause FROM transitions WHERE job = ? ORDER BY sequence", (number,)
    )
    return tuple(
        Transition(sequence, job, from_ and JobState(from_), JobState(to), at, cause)
        for sequence, from_, to, at, cause in rows.fetchall()
    )


def number_and_state(connection: sqlite3.Connection, job: str) -> tuple[int, JobState]:
    """The number and the state of the job of this id. Raises ``UnknownJobError``."""
    row = connection.execute("SELECT number, state FROM jobs WHERE id = ?", (job,)).fetchone()
    if row is None:
        raise UnknownJobError(job)
    return row[0], JobState(row[1])


def _record(row: tuple[Any, ...]) -> JobRecord:
    values = dict(zip(_NAMES.split(", "), row, strict=True))
    try:
        spec = JobSpec.from_json(values["spec"])
        now = PriorityClass(values.pop("priority_class")), values.pop("weight"), tuple(json.loads(values.pop("tags")))
        deadline = values.pop("deadline")
        if (spec.priority_class, spec.weight, spec.tags, spec.deadline) != (*now, deadline):
            spec = replace(spec, priority_class=now[0], weight=now[1], tags=now[2], deadline=deadline)
        values["spec"] = spec
        values["state"] = JobState(values["state"])
        values["asked"] = None if values["asked"] is None else JobState(values["asked"])
        return JobRecord(**values)
    except ValueError as error:
        raise sqlite3.DataError(f"job {row[0]}: {error}") from error


def _is_text(text: object) -> bool:
    try:
        return isinstance(text, str) and bool(text.encode())
    except UnicodeEncodeError:
        return False
