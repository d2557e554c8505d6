"""The job store: all jobs of a service and the history of each, in one SQLite file.

A process may be killed at any instant. Whatever a method returned is in the file, and ``recover`` finds the jobs that
were running. A request that got no reply may have been carried out or not; ``add`` can be repeated safely with an
idempotency key.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from asyncpipe.errors import OptionError
from asyncpipe.service.job_states import (
    IDEMPOTENCY_KEY,
    JobRecord,
    JobSpec,
    JobState,
    PriorityClass,
    Transition,
    is_idempotency_key,
    tidy_cause,
)
from asyncpipe.service.store import queries, reading
from asyncpipe.service.store.database import StoreError, StoreProblem
from asyncpipe.service.store.database_thread import DatabaseThread
from asyncpipe.service.store.queries import IdempotencyConflictError, QueueFullError
from asyncpipe.service.store.reading import (
    AmbiguousJobError,
    JobCandidate,
    JobFilter,
    PastDeadlineError,
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
    "StoreError",
    "StoreProblem",
    "UnknownJobError",
    "make_id",
]

MAX_SNAPSHOT = 1000
MAX_SCHEDULE = 200
MAX_STEP = 2**63 - 1
MAX_LIMIT = 1000

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
    not learn the result; the request is carried out nevertheless. Leaving the context waits for all requests. All
    methods raise ``StoreError`` where the file cannot be used; that request changed nothing, and the next one tries
    the file again.
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
        self.thread = DatabaseThread(self.path, busy_seconds)
        """Runs any function on the store's connection."""
        # Ends the thread, which does not refer to the store, when the store is collected without having been closed, or
        # the interpreter exits.
        weakref.finalize(self, self.thread.stop)

    async def __aenter__(self) -> JobStore:
        await self.thread.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.thread.close()

    # Changing

    async def add(
        self,
        spec: JobSpec,
        idempotency_key: str | None = None,
        *,
        most_queued: int | None = None,
        forked_from: str | None = None,
    ) -> tuple[JobRecord, bool]:
        """The new job, queued, and true; or the job that the same key and specification created before, and false.

        Raises ``JobSpecError``, ``OptionError`` (the key), ``IdempotencyConflictError`` where the key was used with
        another specification, ``QueueFullError`` for a new job if ``most_queued`` jobs are queued already, and
        ``PastDeadlineError``.
        """
        spec.to_json()
        if idempotency_key is not None and not is_idempotency_key(idempotency_key):
            raise OptionError(f"an idempotency key is {IDEMPOTENCY_KEY}")

        def change(connection: sqlite3.Connection) -> tuple[JobRecord, bool]:
            at = self._clock()
            job = self._make_id(at)
            record = queries.add_job(connection, job, spec, at, idempotency_key, most_queued, forked_from)
            return record, record.id == job

        return await self.thread.run(change, writes=True)

    async def transition(
        self,
        job: str,
        to: JobState,
        cause: str,
        *,
        expect: JobState | None = None,
        most_queued: int | None = None,
        crashed: bool = False,
    ) -> JobRecord:
        """``job`` after its transition to the state ``to``, because of ``cause`` (a sentence for operators).

        With ``expect``, only from that state; with ``crashed``, it has one crash more. Raises ``UnknownJobError``;
        ``JobStateError``, also for a job that is in ``to`` already; ``QueueFullError`` if ``most_queued`` jobs are
        queued already; ``OptionError`` without a cause.
        """
        cause = tidy_cause(cause)
        to, expect = JobState(to), None if expect is None else JobState(expect)

        return await self._run(
            job,
            lambda db: queries.change_state(db, job, to, self._clock(), cause, expect, most_queued, crashed),
            writes=True,
        )

    async def ask(self, job: str, to: JobState | None, cause: str) -> JobRecord:
        """The running ``job``, with the request to become ``to`` (``paused`` or ``cancelled``) in the store.

        This is no transition yet; if the process ends before the job does, ``recover`` makes it. ``None`` withdraws
        the request, except for a cancellation. A repeated request changes nothing. Raises ``UnknownJobError``,
        ``JobStateError``, and ``OptionError`` without a cause.
        """
        cause = tidy_cause(cause)
        to = None if to is None else JobState(to)

        return await self._run(job, lambda db: queries.ask_job(db, job, to, self._clock(), cause), writes=True)

    async def change_schedule(self, job: str, schedule: str) -> JobRecord:
        """``job`` with ``schedule`` in place of the one before. The caller has checked that the job can follow it.

        Raises ``UnknownJobError``, ``JobStateError`` for a job in a final state, ``OptionError``.
        """
        if not isinstance(schedule, str) or not (0 < len(schedule) <= MAX_SCHEDULE and _is_text(schedule)):
            raise OptionError(f"a schedule's name is a text of 1 to {MAX_SCHEDULE} characters, not {schedule!r:.100}")

        return await self._run(job, lambda db: queries.change_schedule(db, job, schedule, self._clock()), writes=True)

    async def amend(
        self,
        job: str,
        *,
        priority_class: PriorityClass | None = None,
        weight: float | None = None,
        tags: Collection[str] | None = None,
    ) -> JobRecord:
        """``job`` with another priority class, weight or other tags; what is ``None`` stays.

        Raises ``UnknownJobError``, and ``JobSpecError`` for values that no job can have.
        """
        new = {"priority_class": priority_class, "weight": weight, "tags": None if tags is None else tuple(tags)}
        given = {name: value for name, value in new.items() if value is not None}

        return await self._run(job, lambda db: queries.amend_job(db, job, given, self._clock()), writes=True)

    async def progress(self, job: str, step: int, snapshot: str | None = None) -> None:
        """Record that the running ``job`` has done ``step`` steps and, if given, that ``snapshot`` is on disk.

        The step may be smaller than the last one, after the job went back to a snapshot. Raises ``UnknownJobError``,
        ``JobStateError`` for a job that is not running, ``OptionError``.
        """
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
            raise OptionError(f"a step is an integer from 0 to {MAX_STEP}, not {step!r:.100}")
        if snapshot is not None and not (0 < len(snapshot) <= MAX_SNAPSHOT and _is_text(snapshot)):
            raise OptionError(f"a snapshot's name is a text of 1 to {MAX_SNAPSHOT} characters, not {snapshot!r:.100}")

        await self._run(job, lambda db: queries.note_progress(db, job, step, snapshot, self._clock()), writes=True)

    async def count_crash(self, job: str, crashes: int) -> JobRecord:
        """``job`` with ``crashes``: a queued job whose measuring may take the service along. Raises as ``get``."""
        return await self._run(job, lambda db: queries.count_crash(db, job, crashes), writes=True)

    async def recover(self, *, most_crashes: int = MAX_STEP, resume: bool = True) -> tuple[JobRecord, ...]:
        """The jobs that were running when the last process ended, queued again; foreground jobs first, then by age.

        Each has one crash more. Those that have ``most_crashes`` then are quarantined. Jobs that had been asked to
        pause or to end become paused or cancelled instead, with the cause given then. Without ``resume``, all others
        are paused, and so are those that were queued. To be called when a service starts, before any job runs. Changes
        all of them or none.
        """

        def change(db: sqlite3.Connection) -> tuple[JobRecord, ...]:
            if not resume:
                queries.pause_queued(db, self._clock(), NOT_RESUMED)
            to, cause = (JobState.QUEUED, RECOVERED) if resume else (JobState.PAUSED, NOT_RESUMED)
            return queries.recover_jobs(db, self._clock(), to, cause, most_crashes)

        return await self.thread.run(change, writes=True)

    # Reading

    async def get(self, job: str) -> JobRecord:
        """The job of this id. Raises ``UnknownJobError``."""
        return await self._run(job, lambda db: reading.find_job(db, job), writes=False)

    async def resolve(self, text: str) -> str:
        """The id of the job that ``text`` means: its id, the unique beginning of it, or its name if no other has it.

        Raises ``UnknownJobError``, and ``AmbiguousJobError``, which lists candidates.
        """
        return await self._run(text, lambda db: reading.resolve_job(db, text), writes=False)

    async def list(
        self,
        wanted: JobFilter = ALL_JOBS,
        limit: int = 100,
        after: str | None = None,
        *,
        newest_first: bool = False,
    ) -> tuple[JobRecord, ...]:
        """At most ``limit`` of the ``wanted`` jobs in the order of submission, or newest first, that follow ``after``.

        To read page by page, pass the id of the last job as the next call's ``after``; no job is left out or returned
        twice, even if jobs change their state meanwhile. Raises ``UnknownJobError`` for ``after``, ``OptionError`` for
        ``limit``.
        """
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT:
            raise OptionError(f"a list's limit is an integer from 1 to {MAX_LIMIT}, not {limit!r:.100}")

        def read(connection: sqlite3.Connection) -> tuple[JobRecord, ...]:
            return reading.list_jobs(connection, wanted, limit, after, newest_first=newest_first)

        return await self._run(after, read, writes=False)

    async def due(self, at: float) -> tuple[tuple[str, ...], float | None]:
        """The jobs that have not ended by their deadline, ``at`` this time; and when the next deadline is."""
        return await self.thread.run(lambda db: reading.jobs_due(db, at), writes=False)

    async def count(self) -> dict[JobState, int]:
        """How many jobs are in each state, 0 included."""
        return await self.thread.run(reading.count_jobs, writes=False)

    async def newest_change(self) -> int:
        """The number of the newest transition of any job: while it stays the same, no job has changed its state."""
        return await self.thread.run(reading.newest_change, writes=False)

    async def trained_seconds(self, jobs: Collection[str]) -> dict[str, float]:
        """How long each of ``jobs`` has been running in all, until now if it still does; unknown jobs are left out."""
        return await self.thread.run(lambda db: reading.trained_seconds(db, jobs, self._clock()), writes=False)

    async def history(self, job: str) -> tuple[Transition, ...]:
        """Every transition of ``job``, its submission first. Raises ``UnknownJobError``."""
        return await self._run(job, lambda db: reading.history_of(db, job), writes=False)

    async def _run(self, job: str | None, function: Callable[[sqlite3.Connection], _T], *, writes: bool) -> _T:
        """What ``function`` returns. Raises ``UnknownJobError`` for a ``job`` that cannot be passed to SQLite."""
        if job is not None and not _is_text(job):
            raise UnknownJobError(job)
        return await self.thread.run(function, writes=writes)


def _is_text(text: object) -> bool:
    try:
        return isinstance(text, str) and bool(text.encode())
    except UnicodeEncodeError:
        return False
