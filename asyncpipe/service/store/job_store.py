"""The job store: every job of a service and how it came to where it is, in one SQLite file.

::

    service      await store.transition(...)            returns when it is on disk
    job_store.py     JobStore: checks what was asked
    writer.py        the thread that owns the connection; many requests in one commit
    queries.py       what is said to SQLite
    file.py          the file, its schema, its errors in words
    job_states.py          states, and which may follow which

A process may be killed at any instant: what a method returned is in the file, and a job that was running then is found
so by ``recover``. What nobody was told of may be there or not; ``submit`` with an idempotency key can be asked again.
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
from asyncpipe.service.job_states import JobRecord, JobSpec, JobState, Transition, tidy_cause
from asyncpipe.service.store import queries
from asyncpipe.service.store.database import StoreError, StoreProblem, explain, open_database
from asyncpipe.service.store.database_thread import DatabaseThread
from asyncpipe.service.store.queries import IdempotencyConflictError, QueueFullError, UnknownJobError

__all__ = [
    "IdempotencyConflictError",
    "JobStore",
    "QueueFullError",
    "StoreError",
    "StoreProblem",
    "UnknownJobError",
    "make_id",
]

MAX_KEY = 200
MAX_SNAPSHOT = 1000
MAX_SCHEDULE = 200
MAX_STEP = 2**63 - 1
MAX_LIMIT = 1000

_T = TypeVar("_T")

RECOVERED = "the service was restarted"

_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's, without letters that are read as digits; in the order of their values, as text too."""


def make_id(at: float) -> str:
    """A new job id: 10 digits of the Unix time ``at`` in milliseconds, then 16 at random (80 bits), base 32.

    Sorts by time, cannot be guessed, and is a good name for a folder, also where case is ignored.
    """
    value = (int(at * 1000) % 2**48) << 80 | secrets.randbits(80)
    return "".join(_DIGITS[value >> shift & 31] for shift in range(125, -5, -5))


class JobStore:
    """The jobs in the file at ``path``; an async context manager that opens once.

    Every method is a coroutine, of any event loop, that returns when what it did is on disk. Whoever is cancelled in
    one does not learn what became of it; it is done all the same. The end of the context waits for all that was asked.
    All methods raise ``StoreError`` where the file cannot be used; nothing of that request was kept then, and the next
    one is tried anew.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Callable[[], float] = time.time,
        make_id: Callable[[float], str] = make_id,
        busy_seconds: float = 5.0,
    ) -> None:
        """``clock`` gives Unix times, ``make_id`` an id of a time; both are called in the store's thread.

        ``busy_seconds``: how long opening waits for another process to let go of the file.
        """
        self.path = path = Path(path).absolute()
        self._clock = clock
        self._make_id = make_id

        def closed() -> StoreError:
            return StoreError(path, StoreProblem.CLOSED, "is not open", "use it inside 'async with', which opens once")

        self._writer = DatabaseThread(
            "asyncpipe job store",
            connect=lambda: open_database(path, busy_seconds),
            explain=lambda error: explain(path, error),
            closed=closed,
        )
        # The thread ends when the store is dropped without being closed, or the interpreter exits.
        self._finalizer = weakref.finalize(self, self._writer.stop)

    @property
    def commits(self) -> int:
        """Transactions since it was opened; requests that wait at the same time share one."""
        return self._writer.commits

    @property
    def is_alive(self) -> bool:
        """Whether its thread is there to answer; from any thread."""
        return self._writer._thread is not None and self._writer._thread.is_alive()

    async def __aenter__(self) -> JobStore:
        await self._writer.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._writer.close()

    # Changing

    async def submit(self, spec: JobSpec, idempotency_key: str | None = None) -> JobRecord:
        """The new job, queued. The same key and specification again give the job that they made before.

        Raises ``JobSpecError``, ``OptionError`` (the key), and ``IdempotencyConflictError`` where the key was used for
        another specification.
        """
        record, _ = await self.add(spec, idempotency_key)
        return record

    async def add(
        self, spec: JobSpec, idempotency_key: str | None = None, *, most_queued: int | None = None
    ) -> tuple[JobRecord, bool]:
        """What ``submit`` returns, and whether it is new.

        Raises what ``submit`` does; ``QueueFullError`` for a new one where ``most_queued`` jobs wait already.
        """
        text = spec.to_json()
        if idempotency_key is not None and not _is_plain(idempotency_key, MAX_KEY):
            raise OptionError(f"an idempotency key is 1 to {MAX_KEY} printable ASCII characters")

        def work(connection: sqlite3.Connection) -> tuple[JobRecord, bool]:
            at = self._clock()
            job = self._make_id(at)
            record = queries.add_job(connection, job, text, spec.priority_class, at, idempotency_key, most_queued)
            return record, record.id == job

        return await self._writer.run(work, writes=True)

    async def transition(
        self, job: str, to: JobState, cause: str, *, expect: JobState | None = None, most_queued: int | None = None
    ) -> JobRecord:
        """``job`` after it became ``to``, because of ``cause`` (a sentence that operators read).

        With ``expect``, only if it was in that state. Raises ``UnknownJobError``; ``JobStateError``, also for a job
        that is in ``to`` already; ``QueueFullError`` where ``most_queued`` jobs wait already; ``OptionError`` without
        a cause.
        """
        cause = tidy_cause(cause)
        to, expect = JobState(to), None if expect is None else JobState(expect)

        def work(connection: sqlite3.Connection) -> JobRecord:
            return queries.change_state(connection, job, to, self._clock(), cause, expect, most_queued)

        return await self._about(job, work, writes=True)

    async def ask(self, job: str, to: JobState | None, cause: str) -> JobRecord:
        """The running ``job``, of which is kept that it shall become ``to`` (``paused`` or ``cancelled``), and why.

        ``recover`` makes it that, should the process end before the job does. ``None`` takes it back. What was asked
        before is not asked twice, and a cancellation cannot be taken back. No transition. Raises ``UnknownJobError``,
        ``JobStateError``, ``OptionError`` without a cause.
        """
        cause = tidy_cause(cause)
        to = None if to is None else JobState(to)

        def work(connection: sqlite3.Connection) -> JobRecord:
            return queries.ask_job(connection, job, to, self._clock(), cause)

        return await self._about(job, work, writes=True)

    async def change_schedule(self, job: str, schedule: str) -> JobRecord:
        """``job``, of which is kept that it follows ``schedule`` from now on. Whether it can is for the caller to say.

        Raises ``UnknownJobError``, ``JobStateError`` for a job that is at its end, ``OptionError``.
        """
        if not isinstance(schedule, str) or not (0 < len(schedule) <= MAX_SCHEDULE and _is_text(schedule)):
            raise OptionError(f"a schedule's name is a text of 1 to {MAX_SCHEDULE} characters, not {schedule!r:.100}")

        def work(connection: sqlite3.Connection) -> JobRecord:
            return queries.change_schedule(connection, job, schedule, self._clock())

        return await self._about(job, work, writes=True)

    async def progress(self, job: str, step: int, snapshot: str | None = None) -> None:
        """Keep that the running ``job`` has done ``step`` steps and, if given, that ``snapshot`` is on disk.

        No transition. The step may be smaller than the last one: a job goes back to its snapshot. Raises
        ``UnknownJobError``, ``JobStateError`` for a job that is not running, ``OptionError``.
        """
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
            raise OptionError(f"a step is an integer from 0 to {MAX_STEP}, not {step!r:.100}")
        if snapshot is not None and not (0 < len(snapshot) <= MAX_SNAPSHOT and _is_text(snapshot)):
            raise OptionError(f"a snapshot's name is a text of 1 to {MAX_SNAPSHOT} characters, not {snapshot!r:.100}")

        def work(connection: sqlite3.Connection) -> None:
            queries.note_progress(connection, job, step, snapshot, self._clock())

        await self._about(job, work, writes=True)

    async def recover(self) -> tuple[JobRecord, ...]:
        """The jobs that were running when the last process ended, queued again; the foreground's first, then by age.

        Those that had been asked to pause or to end are paused or cancelled, for the reason that was given then.
        For the start of a service, before anything runs. All or none.
        """

        def work(connection: sqlite3.Connection) -> tuple[JobRecord, ...]:
            return queries.recover_jobs(connection, self._clock(), RECOVERED)

        return await self._writer.run(work, writes=True)

    # Looking

    async def get(self, job: str) -> JobRecord:
        """The job of this id. Raises ``UnknownJobError``."""
        return await self._about(job, lambda connection: queries.find_job(connection, job), writes=False)

    async def list(
        self, states: Collection[JobState] | None = None, limit: int = 100, after: str | None = None
    ) -> tuple[JobRecord, ...]:
        """At most ``limit`` jobs in the order of submission: all, or those in ``states``; from behind job ``after`` on.

        The id of the last one is the next call's ``after``, also when that job has changed its state since: no job is
        left out or shown twice. Raises ``UnknownJobError`` for ``after``, ``OptionError`` for ``limit``.
        """
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT:
            raise OptionError(f"a list's limit is an integer from 1 to {MAX_LIMIT}, not {limit!r:.100}")
        wanted = None if states is None else sorted({JobState(state) for state in states})

        def work(connection: sqlite3.Connection) -> tuple[JobRecord, ...]:
            return queries.list_jobs(connection, wanted, limit, after)

        return await (self._writer.run(work, writes=False) if after is None else self._about(after, work, writes=False))

    async def count(self) -> dict[JobState, int]:
        """How many jobs are in each state, 0 included."""
        return await self._writer.run(queries.count_jobs, writes=False)

    async def history(self, job: str) -> tuple[Transition, ...]:
        """Every transition of ``job``, its submission first. Raises ``UnknownJobError``."""
        return await self._about(job, lambda connection: queries.history_of(connection, job), writes=False)

    async def _about(self, job: str, work: Callable[[sqlite3.Connection], _T], *, writes: bool) -> _T:
        if not _is_text(job):  # SQLite could not even be asked.
            raise UnknownJobError(job)
        return await self._writer.run(work, writes=writes)


def _is_plain(text: str, longest: int) -> bool:
    return isinstance(text, str) and 0 < len(text) <= longest and text.isascii() and text.isprintable()


def _is_text(text: object) -> bool:
    try:
        return isinstance(text, str) and bool(text.encode())
    except UnicodeEncodeError:
        return False
