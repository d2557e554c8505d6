"""The log of a job, for those who follow it: past events from a file, then new ones as they happen.

``jobs/<id>/events.jsonl`` has one line for each transition, note and snapshot, with a number that goes up;
``losses.jsonl`` beside it has the steps (``loss_file.py``). The store is the authority on transitions: those that a
killed process could not log are added when the log is opened next::

    JobRun ──▶ note, snapshot, step ─┐
    Manager ──▶ state ───────────────┴─▶ JobLog ──▶ files
                                           ▲ ▲
                            Follower ──────┘ └────── Follower      each takes what is new when it is ready

Followers have no queues: a follower is a position in the log, of which only the last steps are kept in memory. A slow
follower misses steps, never a state, and delays nobody. The file is bounded: when it is full, the older half is removed
except for its states. A disk that fails is reported to ``trouble`` and stops nothing; what could not be written is
tried again.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from heapq import merge
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Literal, cast, get_args

from asyncpipe.service.job_states import FINAL_STATES, JSON, JobRecord, JobState, Transition
from asyncpipe.service.jobs.loss_file import MOST_PENDING, LossFile, LossRow, read_losses
from asyncpipe.service.whole_writes import write_whole
from asyncpipe.train.blocking_calls import in_thread

__all__ = ["EventKind", "Follower", "JobEvent", "JobLog", "JobLogs", "LossRow", "read_losses"]

EventKind = Literal["state", "note", "snapshot", "step"]

NAME = "events.jsonl"
MOST_EVENTS = 2000
"""In the file and in memory; if there are more, half of them are removed."""
MOST_STATES = 500
"""Older states that are kept then; the store has all states."""
MOST_STEPS = 256
"""Steps in memory; a follower that is further behind misses some."""
BATCH = 200
"""Events that a follower gets at once."""
MAX_TEXT = 2000


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One thing that happened to a job."""

    id: int
    """Increases from event to event; a follower continues after it. A step has the number of the event before it."""
    at: float
    """Unix time."""
    kind: EventKind
    data: Mapping[str, JSON]
    """``state``: number, from, to, cause. ``note``: level, text. ``snapshot``: step, name. ``step``: the fields of
    ``LossRow``, whose numbers may be infinite or NaN."""


class JobLog:
    """The log of one job. ``open`` and ``close`` block; all else belongs to one loop and raises no ``OSError``."""

    def __init__(
        self, folder: Path, trouble: Callable[[str], object] = lambda text: None, clock: Callable[[], float] = time.time
    ) -> None:
        """``folder`` is the job's, created if needed; ``trouble`` is called with a sentence if the disk fails."""
        self.folder = folder
        self._trouble = trouble
        self._clock = clock
        self._events: list[tuple[int, JobEvent]] = []
        """With their ticks, which count events and steps together."""
        self._steps: deque[tuple[int, JobEvent]] = deque(maxlen=MOST_STEPS)
        self.tick = 0
        """The number of events and steps so far."""
        self._states = 0
        """How many transitions were logged, including those that were removed from the file."""
        self._state: JobState | None = None
        self._since = 0.0
        """When the state began; a transition that ``reconcile`` has added already is not added again."""
        self._file: Any = None
        self._losses: LossFile | None = None
        self._rows: deque[LossRow] = deque(maxlen=MOST_PENDING)
        """Steps that wait for ``losses.jsonl`` to be opened."""
        self._is_behind = False
        """Whether the file lacks events, so that it has to be rewritten."""
        self._complained: set[str] = set()
        self._closed = False
        self._changed = asyncio.Event()

    # Opening and closing

    def open(self) -> None:
        """Read the existing events, and repair a file that a killed process left incomplete. Blocks; called first."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            text = (self.folder / NAME).read_bytes() if (self.folder / NAME).exists() else b""
            lines = text.split(b"\n")
            for line in lines[:-1]:
                if (event := _parsed(line)) is not None:
                    self._keep(event)
            self._is_behind = bool(lines[-1]) or len(self._events) != len(lines) - 1
            self._file = _open_file(self.folder / NAME)
        except OSError as error:
            self._complain("opened", error)

    def close(self) -> None:
        """Close the files and end the followers. May block for a moment."""
        self._closed = True
        self._wake()
        for file in (self._file, self._losses):
            if file is not None:
                try:
                    file.close()
                except OSError as error:
                    self._complain("closed", error)
        self._file = self._losses = None

    def reconcile(self, history: Sequence[Transition]) -> None:
        """Add the transitions of ``history``, which the store has, that are missing here."""
        for number, transition in enumerate(history[self._states :], self._states + 1):
            self._add_state(number, transition.from_state, transition.to_state, transition.cause, transition.at)

    # Events

    def state(self, record: JobRecord) -> None:
        """Log the transition to the state in ``record``."""
        if (record.state, record.updated) != (self._state, self._since):
            self._add_state(self._states + 1, self._state, record.state, record.cause, record.updated)

    def note(self, level: int, text: str) -> None:
        """Log a text, with a level of ``logging``."""
        tidy = text.encode("utf-8", "backslashreplace").decode()
        self._add("note", {"level": level, "text": tidy[:MAX_TEXT]}, self._clock())

    def snapshot(self, step: int, name: str) -> None:
        """Log a snapshot that is on disk and in the store."""
        self._add("snapshot", {"step": step, "name": name}, self._clock())

    def step(self, row: LossRow) -> None:
        """Log a step."""
        self.tick += 1
        last = self._events[-1][1].id if self._events else 0
        self._steps.append((self.tick, JobEvent(last, self._clock(), "step", row._asdict())))
        self._wake()
        self._rows.append(row)
        try:
            if self._losses is None:
                self._losses = LossFile(self.folder)
            while self._rows:
                self._losses.append(self._rows.popleft())
            self._complained.discard("losses")
        except OSError as error:
            self._complain("losses", error)

    def events(self) -> list[JobEvent]:
        """All events but steps that are kept, in order."""
        return [event for _, event in self._events]

    # Followers

    def follow(self, after: int = 0) -> Follower:
        """A follower of all events after ``after``, and of the steps from now on."""
        return Follower(self, after, self.tick)

    @property
    def is_over(self) -> bool:
        """Whether no more events can come."""
        return self._closed or self._state in FINAL_STATES

    def since(self, tick: int, after: int, steps_since: int) -> list[tuple[int, JobEvent]]:
        """At most ``BATCH`` events after ``tick`` and ``after``, and steps after ``steps_since``, in order."""
        # Both are sorted by tick, and a follower of a fast job asks after every step: search, do not scan.
        first = bisect_right(self._events, tick, key=_tick_of)
        events = [(at, event) for at, event in self._events[first:] if event.id > after]
        steps = reversed(list(takewhile(lambda pair: pair[0] > max(tick, steps_since), reversed(self._steps))))
        return list(islice(merge(events, steps, key=_tick_of), BATCH))

    async def news(self, tick: int) -> None:
        """Wait until there is something later than ``tick``, or no more events can come."""
        while self.tick <= tick and not self.is_over:
            await self._changed.wait()

    # Memory and file

    def _add_state(self, number: int, from_: JobState | None, to: JobState, cause: str, at: float) -> None:
        self._add("state", {"number": number, "from": from_, "to": to, "cause": cause}, at)

    def _add(self, kind: EventKind, data: Mapping[str, JSON], at: float) -> None:
        event = JobEvent(self._events[-1][1].id + 1 if self._events else 1, at, kind, data)
        self._keep(event)
        if len(self._events) > MOST_EVENTS:
            self._trim()
        try:
            self._write(event)
            self._complained.discard("written")
        except OSError as error:
            self._is_behind = True
            self._complain("written", error)
        self._wake()

    def _keep(self, event: JobEvent) -> None:
        self.tick += 1
        self._events.append((self.tick, event))
        if event.kind == "state":
            self._states = max(self._states, cast(int, event.data["number"]))
            self._state, self._since = JobState(cast(str, event.data["to"])), event.at

    def _trim(self) -> None:
        older, newer = self._events[: -MOST_EVENTS // 2], self._events[-MOST_EVENTS // 2 :]
        states = [pair for pair in older if pair[1].kind == "state"]
        self._events = [*states[-MOST_STATES:], *newer]
        self._is_behind = True

    def _write(self, event: JobEvent) -> None:
        if not self._is_behind and self._file is not None:
            descriptor = self._file.fileno()
            write_whole(descriptor, _line(event), os.fstat(descriptor).st_size)
            return
        beside = self.folder / f"{NAME}.incomplete"
        beside.write_bytes(b"".join(_line(each) for _, each in self._events))
        beside.replace(self.folder / NAME)
        if self._file is not None:
            self._file.close()
        self._file = None
        self._file = _open_file(self.folder / NAME)
        self._is_behind = False

    def _complain(self, what: str, error: OSError) -> None:
        # Reported once until it works again: on a full disk every step fails.
        if what not in self._complained:
            self._complained.add(what)
            files = "losses" if what == "losses" else "events"
            self._trouble(f"the job's {files} cannot be written: {error.strerror or error}")

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Follower:
    """A position in a log. ``next`` is for one caller at a time, on the log's loop."""

    def __init__(self, log: JobLog, after: int, now: int) -> None:
        self._log = log
        self._after = after
        self._steps_since = now
        self._tick = 0

    async def next(self) -> list[JobEvent]:
        """The events since the last call, at least one; waits for it. Empty if no more events can come."""
        while True:
            found = self._log.since(self._tick, self._after, self._steps_since)
            if found:
                self._tick = found[-1][0]
                return [event for _, event in found]
            if self._log.is_over:
                return []
            self._tick = self._log.tick
            await self._log.news(self._tick)


class JobLogs:
    """The logs that are open: those of running jobs and of jobs that are followed. Belongs to one loop."""

    def __init__(self, folder: Path, trouble: Callable[[str, str], object] = lambda job, text: None) -> None:
        """``folder`` has a folder for each job; ``trouble`` is called with a job and a sentence if the disk fails."""
        self.folder = folder
        self._trouble = trouble
        self._open: dict[str, JobLog] = {}
        self._users: dict[str, int] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._closed = False

    def of(self, job: str) -> JobLog | None:
        """The log of ``job``, if it is open."""
        return self._open.get(job)

    @asynccontextmanager
    async def use(self, job: str, history: Callable[[], Awaitable[Sequence[Transition]]]) -> AsyncIterator[JobLog]:
        """The log of ``job``, which all its users share; the first one opens it and the last one closes it.

        ``history`` reads the job's transitions from the store; its errors are raised here.
        """
        self._users[job] = self._users.get(job, 0) + 1
        turn = self._turns.setdefault(job, asyncio.Lock())
        try:
            async with turn:
                if job not in self._open:
                    self._open[job] = await self._opened(job, history)
                    if self._closed:
                        self._open[job].close()
            yield self._open[job]
        finally:
            self._users[job] -= 1
            if not self._users[job]:
                del self._users[job], self._turns[job]
                if (log := self._open.pop(job, None)) is not None:
                    log.close()

    async def _opened(self, job: str, history: Callable[[], Awaitable[Sequence[Transition]]]) -> JobLog:
        log = JobLog(self.folder / job, lambda text: self._trouble(job, text))
        await in_thread(log.open)
        try:
            # No await between the read and its use: a transition that is logged meanwhile would be logged twice.
            log.reconcile(await history())
        except BaseException:
            log.close()
            raise
        return log

    def close(self) -> None:
        """End all followers; those whose log is being opened still get the past events."""
        self._closed = True
        for log in self._open.values():
            log.close()


def _tick_of(pair: tuple[int, JobEvent]) -> int:
    return pair[0]


def _open_file(path: Path) -> Any:
    # Unbuffered, so that a line has reached the operating system when ``write`` returns.
    return path.open("ab", buffering=0)


def _line(event: JobEvent) -> bytes:
    return json.dumps(asdict(event), default=str).encode() + b"\n"


def _parsed(line: bytes) -> JobEvent | None:
    """The event in ``line``; ``None`` if the line is damaged."""
    try:
        table = json.loads(line)
        event = JobEvent(int(table["id"]), float(table["at"]), table["kind"], dict(table["data"]))
        if event.kind not in get_args(EventKind):
            return None
        if event.kind == "state":
            int(event.data["number"]), JobState(event.data["to"])  # type: ignore[arg-type]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return event
