"""The log of a job, for those who follow it: past events from the store, then new ones as they happen.

Notes, snapshots and steps are queued here and written to the store in batches, so that nothing on the loop waits for
the disk::

    JobRun ──▶ note, snapshot, step ─▶ queue ──batches──▶ store ◀── events, losses ── follow
    ActiveJobs ──▶ state, which is in the store ──wake──────────────────────────────────▲

``flush`` returns when all that was queued is on disk; a run awaits it before it renames a snapshot into place, so the
store has all steps of the newest snapshot after a kill. A store that fails is reported to ``trouble`` and stops
nothing: followers are told from memory, and what could not be written is tried again with the next batch.

Followers have no queues: each is a position in the log. The last steps are kept in memory; a slow follower misses
steps, never a state, and delays nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from asyncpipe.service.job_states import FINAL_STATES, JobRecord
from asyncpipe.service.store.job_records import JobEvent, LossRow
from asyncpipe.service.store.job_store import JobStore, StoreError
from asyncpipe.train.blocking_calls import in_thread

__all__ = ["JobLog", "JobLogs"]

FLUSH_SECONDS = 0.5
"""How long a step waits for others before it is written."""
MOST_STEPS = 256
"""Steps in memory; a follower that is further behind misses some."""
MOST_PENDING = 100_000
"""Rows kept in memory while the store cannot write them."""
BATCH = 200
"""Events that a follower gets at once."""
MAX_TEXT = 2000


class JobLog:
    """The log of one job while it runs or is followed. Belongs to one loop; raises no ``StoreError``."""

    def __init__(
        self,
        store: JobStore,
        record: JobRecord,
        folder: Path,
        trouble: Callable[[str], object] = lambda text: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``folder`` is the job's; ``trouble`` is called with a sentence if the store cannot be written."""
        self.job = record.id
        self.folder = folder
        self.store = store
        self.version = 0
        """Counts everything that a follower may want to see."""
        self.written = 0
        """Counts changes of the events in the store."""
        self.live: deque[tuple[int, JobEvent]] = deque(maxlen=MOST_STEPS)
        """The last steps, and events that the store has refused, with their versions."""
        self._trouble = trouble
        self._clock = clock
        self._losses: deque[LossRow] = deque(maxlen=MOST_PENDING)
        self._events: deque[JobEvent] = deque(maxlen=MOST_PENDING)
        self._told = 0
        """How many of these the store has refused, so that followers were told at once."""
        self._is_over = record.state in FINAL_STATES
        self._is_closed = self._has_complained = False
        self._turn = asyncio.Lock()
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._writer = asyncio.create_task(self._write(), name=f"asyncpipe log of {record.id}")

    async def aclose(self) -> None:
        """Write what is left, and end the followers."""
        self.close()
        self._writer.cancel()
        await asyncio.wait([self._writer])
        if self._timer is not None:
            self._timer.cancel()
        await self.flush()

    def close(self) -> None:
        """End the followers."""
        self._is_closed = True
        self._wake()

    @property
    def is_over(self) -> bool:
        """Whether no more events can come."""
        return self._is_closed or self._is_over

    # Events

    def state(self, record: JobRecord) -> None:
        """Tell followers of the transition to the state in ``record``, which the store has."""
        self._is_over = record.state in FINAL_STATES
        self.written += 1
        self._wake()

    def note(self, level: int, text: str) -> None:
        """Log a text, with a level of ``logging``."""
        tidy = text.encode("utf-8", "backslashreplace").decode()
        self._add(JobEvent(0, self._clock(), "note", {"level": level, "text": tidy[:MAX_TEXT]}))

    def snapshot(self, step: int, name: str) -> None:
        """Log a snapshot that is on disk."""
        self._add(JobEvent(0, self._clock(), "snapshot", {"step": step, "name": name}))

    def step(self, row: LossRow) -> None:
        """Log a step; rows of the same and of later steps give way."""
        while self._losses and self._losses[-1].step >= row.step:
            self._losses.pop()
        self._losses.append(row)
        self._wake()
        self.live.append((self.version, JobEvent(0, self._clock(), "step", row._asdict())))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._due.set)

    def _add(self, event: JobEvent) -> None:
        self._events.append(event)
        self._due.set()

    def _wake(self) -> None:
        self.version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def news(self, version: int) -> None:
        """Wait until there is something later than ``version``, or no more events can come."""
        while self.version == version and not self.is_over:
            await self._changed.wait()

    # Writing

    async def _write(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            await self.flush()

    async def flush(self) -> None:
        """Return when all that was logged before is on disk, or the store has refused it."""
        async with self._turn:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            losses, events = list(self._losses), list(self._events)
            if not losses and not events:
                return
            self._losses.clear()
            self._events.clear()
            try:
                await self.store.write_records(self.job, losses, events)
            except StoreError as error:
                later = self._losses[0].step if self._losses else None
                kept = [row for row in losses if later is None or row.step < later]
                self._losses.extendleft(reversed(kept))
                self._events.extendleft(reversed(events))
                self._tell(events[self._told :])
                self._told = len(events)
                if not self._has_complained:  # On a full disk every batch fails.
                    self._has_complained = True
                    self._trouble(f"the job's losses and events cannot be written: {error}")
                return
            self._has_complained, self._told = False, 0
            if events:
                self.written += 1
                self._wake()

    def _tell(self, events: Sequence[JobEvent]) -> None:
        """Tell followers of events that are not in the store yet; they get them again when they are."""
        for event in events:
            self._wake()
            self.live.append((self.version, event))

    # Followers

    def follow(self, after: int = 0) -> AsyncGenerator[list[JobEvent], None]:
        """All events after event ``after``, and the steps from now on, until no more events can come.

        Raises ``StoreError``.
        """
        return self._follow(after, self.version)

    async def _follow(self, after: int, seen: int) -> AsyncGenerator[list[JobEvent], None]:
        read = -1
        while True:
            version, written, is_over, found = self.version, self.written, self.is_over, list[JobEvent]()
            if read != written:
                found = list(await self.store.events(self.job, after, BATCH))
                read = written if len(found) < BATCH else read
            if found:
                after = found[-1].id
                yield found
            elif live := [replace(event, id=after) for at, event in self.live if at > seen]:
                seen = self.live[-1][0]
                yield live
            elif is_over:
                return
            else:
                await self.news(version)


class JobLogs:
    """The logs that are open: those of running jobs and of jobs that are followed. Belongs to one loop."""

    def __init__(
        self, store: JobStore, folder: Path, trouble: Callable[[str, str], object] = lambda job, text: None
    ) -> None:
        """``folder`` has a folder for each job; ``trouble`` is called with a job and a sentence if the disk fails."""
        self.folder = folder
        self._store = store
        self._trouble = trouble
        self._open: dict[str, JobLog] = {}
        self._users: dict[str, int] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._closed = False

    def of(self, job: str) -> JobLog | None:
        """The log of ``job``, if it is open."""
        return self._open.get(job)

    async def flush(self, job: str) -> None:
        """Return when what was logged of ``job`` is on disk."""
        if (log := self._open.get(job)) is not None:
            await log.flush()

    @asynccontextmanager
    async def use(self, job: str) -> AsyncIterator[JobLog]:
        """The log of ``job``, which all its users share; the first one opens it and the last one closes it.

        Raises ``UnknownJobError``, ``StoreError``.
        """
        self._users[job] = self._users.get(job, 0) + 1
        turn = self._turns.setdefault(job, asyncio.Lock())
        try:
            async with turn:
                if job not in self._open:
                    self._open[job] = await self._opened(job)
                    if self._closed:
                        self._open[job].close()
            yield self._open[job]
        finally:
            self._users[job] -= 1
            if not self._users[job]:
                del self._users[job], self._turns[job]
                if (log := self._open.pop(job, None)) is not None:
                    await log.aclose()

    async def _opened(self, job: str) -> JobLog:
        folder = self.folder / job
        try:
            await in_thread(lambda: folder.mkdir(parents=True, exist_ok=True, mode=0o700))
        except OSError as error:
            self._trouble(job, f"the job's folder cannot be made: {error.strerror or error}")
        # No await between the read and its use: a transition that is recorded meanwhile would not be told.
        return JobLog(self._store, await self._store.get(job), folder, lambda text: self._trouble(job, text))

    def close(self) -> None:
        """End all followers; those whose log is being opened still get the past events."""
        self._closed = True
        for log in self._open.values():
            log.close()
