"""The job store: all jobs of a service, their histories, events and losses, in one SQLite file.

A process may be killed at any instant. Whatever a method returned is in the file, and ``recover`` finds the jobs that
were running. A request that got no reply may have been carried out or not; ``add`` can be repeated safely with an
idempotency key.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from asyncpipe.errors import OptionError
from asyncpipe.service.access import Whose
from asyncpipe.service.job_states import (
    FINAL_STATES,
    IDEMPOTENCY_KEY,
    JobRecord,
    JobState,
    JobStateError,
    PriorityClass,
    Transition,
    check_asking,
    check_transition,
    is_idempotency_key,
    tidy_cause,
)
from asyncpipe.service.store import job_records
from asyncpipe.service.store.changing import Admit, change_state, insert_job, update_job
from asyncpipe.service.store.database import StoreError, StoreProblem
from asyncpipe.service.store.database_thread import DatabaseThread
from asyncpipe.service.store.device_runs import DeviceRun, read_runs
from asyncpipe.service.store.failures import FailureGroup, find_failures
from asyncpipe.service.store.finding import (
    JobFigures,
    JobFilter,
    JobHead,
    due_jobs,
    every_job,
    figures_of,
    find_job,
    is_text,
    last_failures,
    list_jobs,
    number_of,
    of_whose,
    resolve_job,
)
from asyncpipe.service.store.job_records import JobEvent, LossRow
from asyncpipe.service.store.store_errors import (
    AmbiguousJobError,
    IdempotencyConflictError,
    JobCandidate,
    PastDeadlineError,
    QueueFullError,
    QuotaError,
    UnknownJobError,
)

__all__ = [
    "ALL_JOBS",
    "AmbiguousJobError",
    "IdempotencyConflictError",
    "JobCandidate",
    "JobFilter",
    "JobStore",
    "PastDeadlineError",
    "QueueFullError",
    "QuotaError",
    "StoreError",
    "StoreProblem",
    "UnknownJobError",
    "make_id",
]

MAX_STEP = 2**63 - 1
MAX_LIMIT = 1000
EVERYTHING = 2**62

_T = TypeVar("_T")

ALL_JOBS = JobFilter()
"""Lists have all jobs."""

NOT_RESUMED = "the service was started so that nothing goes on by itself: resume the job"
RECOVERED = "the service was restarted"

_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32: without letters that look like digits; sorted as text they are in the order of their values."""


def make_id(at: float) -> str:
    """A new job id: 10 base-32 digits of the Unix time ``at`` in milliseconds, then 16 random ones (80 bits).

    Ids sort by time, cannot be guessed, and can name a folder, also on a file system that ignores case.
    """
    value = (int(at * 1000) % 2**48) << 80 | secrets.randbits(80)
    return "".join(_DIGITS[value >> shift & 31] for shift in range(125, -5, -5))


class JobStore:
    """The jobs in the file at ``path``; an async context manager that opens once.

    Methods can be awaited on any event loop and return once their changes are on disk. A caller that is cancelled does
    not learn the result; the request is carried out nevertheless. Leaving the context waits for all requests. Methods
    that name a job raise ``UnknownJobError``, and all raise ``StoreError`` where the file cannot be used; that request
    changed nothing, and the next one tries the file again.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Callable[[], float] = time.time,
        make_id: Callable[[float], str] = make_id,
        busy_seconds: float = 5.0,
    ) -> None:
        """``clock`` returns Unix times, ``make_id`` an id for a time; both are called in the store's thread.

        ``busy_seconds`` is how long opening waits for another process to release the file.
        """
        self.path = Path(path).absolute()
        self._clock = clock
        self._make_id = make_id
        self.admit: Admit = lambda *_: None
        """Called in the store's thread before a client's request queues a job; raises what refuses it."""
        self._thread = DatabaseThread(self.path, busy_seconds)
        # Ends the thread, which does not refer to the store, when the store is collected without having been closed, or
        # the interpreter exits.
        weakref.finalize(self, self._thread.stop)

    async def __aenter__(self) -> JobStore:
        await self._thread.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._thread.close()

    @property
    def is_alive(self) -> bool:
        """Whether the store's thread runs; from any thread."""
        return self._thread.is_alive

    @property
    def trouble(self) -> StoreError | None:
        """Why nothing can be written, until ``probe`` finds that it can be; from any thread."""
        return self._thread.trouble

    async def probe(self) -> None:
        """Try whether there is room again, and end ``trouble`` then. Raises ``OSError`` or ``StoreError`` if not."""
        await self._thread.probe()

    @property
    def commits(self) -> int:
        """Transactions that changed something; requests that wait at the same time share one. From any thread."""
        return self._thread.commits

    # Changing

    async def add(
        self,
        document: Mapping[str, Any],
        idempotency_key: str | None = None,
        **more: Any,
    ) -> tuple[JobRecord, bool]:
        """The new job with the checked ``document``, queued, and true; or the job of the same key, and false.

        ``more`` are its ``owner``, ``teams`` and ``code``. Raises ``OptionError`` (the key),
        ``IdempotencyConflictError`` where the key was used with another document, for a new job what ``admit`` raises,
        and ``PastDeadlineError``. Each owner has idempotency keys of his own.
        """
        digest = sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
        if idempotency_key is not None and not is_idempotency_key(idempotency_key):
            raise OptionError(f"an idempotency key is {IDEMPOTENCY_KEY}")
        owner = more.get("owner")
        own_key = idempotency_key if owner is None or idempotency_key is None else f"{owner}\n{idempotency_key}"

        def change(db: sqlite3.Connection) -> tuple[JobRecord, bool]:
            if idempotency_key is not None:
                row = db.execute("SELECT id, digest FROM jobs WHERE idempotency_key = ?", (own_key,)).fetchone()
                if row is not None and row[1] != digest:
                    raise IdempotencyConflictError(idempotency_key, row[0])
                if row is not None:
                    return find_job(db, row[0]), False
            at, deadline = self._clock(), document.get("deadline")
            if deadline is not None and deadline <= at:
                raise PastDeadlineError(deadline)
            self.admit(db, owner, more.get("teams", ()), document)
            job, key = self._make_id(at), {"idempotency_key": own_key, "digest": digest}
            insert_job(db, job, document, at, "submitted", **key, **more)
            return find_job(db, job), True

        return await self._thread.run(change)

    async def fork(
        self,
        job: str,
        document: Mapping[str, Any],
        origin: str,
        step: int,
        **more: Any,
    ) -> JobRecord:
        """The new ``job``, queued, whose folder has a copy of the snapshot of ``origin`` after ``step``.

        It has the losses of ``origin`` until there; a step of 0 is the beginning. ``more`` as of ``add``, and what its
        cause ends with as ``because``. Raises what ``admit`` raises.
        """
        cause = f"forked from {origin}" + (f" after step {step}" if step else "") + more.pop("because", "")
        more |= {"forked_from": origin, "step": step, "snapshot": f"step-{step}" if step else None}

        def change(db: sqlite3.Connection) -> JobRecord:
            self.admit(db, more.get("owner"), more.get("teams", ()), document)
            number = insert_job(db, job, document, self._clock(), cause, **more)
            job_records.copy_losses(db, origin, number, step)
            return find_job(db, job)

        return await self._thread.run(change)

    async def transition(
        self,
        job: str,
        to: JobState,
        cause: str,
        *,
        expect: JobState | None = None,
        admit: bool = False,
        **changes: Any,
    ) -> JobRecord:
        """``job`` after its transition to the state ``to``, because of ``cause`` (a sentence for operators).

        With ``expect``, only from that state; with ``admit``, raises what the method of this name raises. ``changes``
        are further fields of its record: ``crashes``, ``failures``, ``placed``, ``root``. A job that is retried has no
        crashes, no failures, and no deadline that has passed. Raises ``JobStateError``, also for a job that is in
        ``to`` already; ``OptionError`` without a cause.
        """
        cause, to, expect = tidy_cause(cause), JobState(to), None if expect is None else JobState(expect)

        def change(db: sqlite3.Connection) -> JobRecord:
            record = find_job(db, job)
            check_transition(job, record.state, to, expect)
            if admit:
                self.admit(db, record.owner, record.teams, record.document)
            return change_state(db, replace(record, **changes), to, self._clock(), cause)

        return await self._about(job, change)

    async def retry(
        self,
        job: str,
        cause: str,
        from_step: int | None = None,
        document: Mapping[str, Any] | None = None,
        *,
        step: int = 0,
    ) -> JobRecord:
        """``job``, which has ended, queued again: from the snapshot of ``from_step``, and with another ``document``.

        ``step`` is that of the snapshot, also where ``from_step`` is ``None`` and it is the newest. Raises
        ``JobStateError``, and what ``admit`` raises.
        """

        def change(db: sqlite3.Connection) -> JobRecord:
            record = find_job(db, job)
            if record.state not in FINAL_STATES:
                raise JobStateError(job, record.state, "be retried, since it has not ended")
            check_transition(job, record.state, JobState.QUEUED)
            self.admit(db, record.owner, record.teams, record.document if document is None else document)
            changes: dict[str, Any] = {"step": step} if document is None else {"step": step, "document": document}
            if from_step is not None:
                snapshot = f"step-{from_step}" if from_step else None
                changes |= {"from_step": from_step, "snapshot": snapshot}
            return change_state(db, replace(record, **changes), JobState.QUEUED, self._clock(), tidy_cause(cause))

        return await self._about(job, change)

    async def ask(self, job: str, to: JobState | None, cause: str) -> JobRecord:
        """The running ``job``, with the request to become ``to`` (``paused`` or ``cancelled``) in the store.

        This is no transition yet; if the process ends before the job does, ``recover`` makes it. ``None`` withdraws
        the request, except for a cancellation. A repeated request changes nothing. Raises ``JobStateError``, and
        ``OptionError`` without a cause.
        """
        cause, to = tidy_cause(cause), None if to is None else JobState(to)

        def change(db: sqlite3.Connection) -> JobRecord:
            record = find_job(db, job)
            check_asking(job, record.state, record.asked, to)
            if to is record.asked:
                return record
            return update_job(db, replace(record, asked=to, asked_cause=to and cause, updated=self._clock()))

        return await self._about(job, change)

    async def amend(self, job: str, **changes: Any) -> JobRecord:
        """``job`` with other values at the top of its document. The caller has checked them.

        Raises ``JobStateError`` for a job that has ended, of which only the tags can change.
        """

        def change(db: sqlite3.Connection) -> JobRecord:
            record = find_job(db, job)
            if record.state in FINAL_STATES and changes.keys() - {"tags"}:
                raise JobStateError(job, record.state, "change its schedule, priority class or weight")
            return update_job(db, replace(record, document={**record.document, **changes}, updated=self._clock()))

        return await self._about(job, change)

    async def write_records(self, job: str, losses: Sequence[LossRow], events: Sequence[JobEvent]) -> None:
        """Write steps of ``job``, in increasing order, and notes and snapshots that are on disk.

        The first step of ``losses`` replaces all rows from that step on. What a running job has done follows from them:
        its step and its newest snapshot. A snapshot resets the counts of crashes and failures.
        """

        def change(db: sqlite3.Connection) -> None:
            number, changes = number_of(db, job), dict[str, Any]()
            job_records.write_losses(db, number, losses)
            job_records.write_events(db, number, events)
            if losses:
                changes["step"] = losses[-1].step
            for event in events:
                if event.kind == "snapshot":
                    changes |= {"snapshot": event.data["name"], "crashes": 0, "failures": 0}
            if changes:  # Of these columns alone: each running job does this each second.
                names = ", ".join(f"{name} = ?" for name in changes)
                values = (*changes.values(), self._clock(), number, JobState.RUNNING)
                db.execute(f"UPDATE jobs SET {names}, updated = ? WHERE number = ? AND state = ?", values)  # noqa: S608

        await self._about(job, change)

    async def delete(self, job: str) -> JobRecord:
        """Delete a job that has ended with its history, events and losses; its last record.

        Raises ``JobStateError`` for one that has not ended.
        """

        def change(db: sqlite3.Connection) -> JobRecord:
            record = find_job(db, job)
            if record.state not in FINAL_STATES:
                raise JobStateError(job, record.state, "be deleted before it has ended")
            db.execute("DELETE FROM jobs WHERE id = ?", (job,))
            return record

        return await self._about(job, change)

    async def recover(self, *, most_crashes: int = MAX_STEP, resume: bool = True) -> tuple[JobRecord, ...]:
        """Queue the jobs that were running when the last process ended; all jobs that this has changed.

        Foreground jobs come first, then the older ones. Each has one crash more; those that have ``most_crashes`` then
        are quarantined. Jobs that had been asked to pause or to end become paused or cancelled instead, with the cause
        given then. Without ``resume``, all others are paused, and so are those that were queued. Call it when a service
        starts, before any job runs. Changes all of them or none.
        """
        to, cause = (JobState.QUEUED, RECOVERED) if resume else (JobState.PAUSED, NOT_RESUMED)
        died = f"the service died {most_crashes} times while it ran since its last snapshot"

        def change(db: sqlite3.Connection) -> tuple[JobRecord, ...]:
            at, found = self._clock(), []
            rows = db.execute(
                "SELECT id FROM jobs WHERE state = ?1 OR (state = ?2 AND ?3)"
                " ORDER BY state = ?2, priority_class = ?4, number",
                (JobState.RUNNING, JobState.QUEUED, not resume, PriorityClass.BACKGROUND),
            ).fetchall()
            for (job,) in rows:
                record = find_job(db, job)
                record = replace(record, crashes=record.crashes + (record.state is JobState.RUNNING))
                if record.crashes >= most_crashes and record.asked is not JobState.CANCELLED:
                    found.append(change_state(db, record, JobState.QUARANTINED, at, died, record.updated))
                else:
                    cause_now = record.asked_cause or cause
                    found.append(change_state(db, record, record.asked or to, at, cause_now, record.updated))
            return tuple(found)

        return await self._thread.run(change)

    # Reading

    async def runs(self, since: float) -> Sequence[DeviceRun]:
        """The runs, also of deleted jobs, that ended at ``since`` or later, or have not ended; the oldest first."""
        return await self._thread.run(lambda db: read_runs(db, since))

    async def get(self, job: str) -> JobRecord:
        """The job of this id."""
        return await self._about(job, lambda db: find_job(db, job))

    async def resolve(self, text: str, whose: Whose | None = None) -> str:
        """The id of the job that ``text`` means: its id, the unique beginning of it, or its name if no other has it.

        Of the jobs of ``whose``, or of all. Raises ``AmbiguousJobError``, which lists candidates.
        """
        return await self._about(text, lambda db: resolve_job(db, text, whose))

    async def list(
        self, wanted: JobFilter = ALL_JOBS, limit: int = 100, after: str | None = None, *, newest_first: bool = False
    ) -> tuple[JobRecord, ...]:
        """At most ``limit`` of the ``wanted`` jobs in the order of submission, or newest first, that follow ``after``.

        To read page by page, pass the id of the last job as the next call's ``after``; no job is left out or returned
        twice, even if jobs change their state meanwhile. Raises ``OptionError`` for ``limit``.
        """
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT:
            raise OptionError(f"a list's limit is an integer from 1 to {MAX_LIMIT}, not {limit!r:.100}")
        return await self._about(after, lambda db: list_jobs(db, wanted, limit, after, newest_first=newest_first))

    async def failures(self, wanted: JobFilter = ALL_JOBS, limit: int = 100) -> tuple[FailureGroup, ...]:
        """At most ``limit`` groups of the ``wanted`` jobs that have failed in the same way, the newest first."""
        return await self._thread.run(lambda db: find_failures(db, wanted, limit))

    async def every(self) -> Sequence[JobHead]:
        """The heads of all jobs, oldest first: for the comparison with their folders."""
        return await self._thread.run(every_job)

    async def updated(self, whose: Whose) -> Sequence[tuple[str, float]]:
        """The ids of all jobs of ``whose``, and when each was updated."""
        clause, values = of_whose(whose)
        every = f"SELECT id, updated FROM jobs WHERE {clause}"  # noqa: S608 - no input
        return await self._thread.run(lambda db: db.execute(every, values).fetchall())

    async def ever(self) -> int:
        """How many jobs there have ever been, those that were deleted as well."""
        number = "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'jobs'"
        return await self._thread.run(lambda db: int(db.execute(number).fetchone()[0]))

    async def due(self, at: float) -> tuple[tuple[str, ...], float | None]:
        """The jobs that have not ended by their deadline, ``at`` this time; and when the next deadline is."""
        return await self._thread.run(lambda db: due_jobs(db, at))

    async def count(self, whose: Whose | None = None) -> dict[JobState, int]:
        """How many jobs of ``whose`` (``None``: of everybody) are in each state, 0 included."""
        clause, values = of_whose(whose)

        def read(db: sqlite3.Connection) -> dict[JobState, int]:
            counts = db.execute(f"SELECT state, count(*) FROM jobs WHERE {clause} GROUP BY state", values).fetchall()  # noqa: S608 - no input
            return dict.fromkeys(JobState, 0) | {JobState(state): count for state, count in counts}

        return await self._thread.run(read)

    async def newest_change(self, whose: Whose | None = None) -> int:
        """The number of the newest transition of a job of ``whose``: while it stays, none has changed its state."""
        clause, values = of_whose(whose)
        of_jobs = "" if whose is None else f" AND job IN (SELECT number FROM jobs WHERE {clause})"  # noqa: S608
        newest = f"SELECT coalesce(max(sequence), 0) FROM events WHERE kind = 'state'{of_jobs}"  # noqa: S608
        return await self._thread.run(lambda db: int(db.execute(newest, values).fetchone()[0]))

    async def last_failures(self, most: int) -> tuple[tuple[str, str, JobState, float], ...]:
        """(id, name, state, since when) of the last ``most`` jobs that are failed or quarantined, oldest first."""
        return await self._thread.run(lambda db: last_failures(db, most))

    async def figures(self, jobs: Collection[str]) -> dict[str, JobFigures]:
        """How long each of ``jobs`` has run and waited, until now, and its last loss; unknown jobs are left out."""
        return await self._thread.run(lambda db: figures_of(db, jobs, self._clock()))

    async def history(self, job: str) -> tuple[Transition, ...]:
        """Every transition of ``job``, its submission first."""
        return await self._about(job, lambda db: job_records.read_transitions(db, job))

    async def events(self, job: str, after: int = 0, limit: int = EVERYTHING) -> Sequence[JobEvent]:
        """At most ``limit`` states, notes and snapshots of ``job`` that follow event ``after``."""
        return await self._about(job, lambda db: job_records.read_events(db, job, after, limit))

    async def losses(self, job: str, after: int = 0, limit: int = EVERYTHING) -> Sequence[LossRow]:
        """At most ``limit`` steps of ``job`` that follow step ``after``."""
        return await self._about(job, lambda db: job_records.read_losses(db, job, after, limit))

    async def spread_losses(self, job: str, most: int) -> Sequence[LossRow]:
        """At most ``most`` steps of ``job``, evenly spread from its first to its last."""
        return await self._about(job, lambda db: job_records.spread_losses(db, job, most))

    async def _about(self, job: str | None, function: Callable[[sqlite3.Connection], _T]) -> _T:
        """What ``function`` returns. Raises ``UnknownJobError`` for a ``job`` that cannot be passed to SQLite."""
        if job is not None and not is_text(job):
            raise UnknownJobError(job)
        return await self._thread.run(function)
