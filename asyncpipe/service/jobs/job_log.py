"""What happened to a job, for those who watch it: past events from a file, then new ones as they come.

``jobs/<id>/events.jsonl`` has the job's transitions, the notes of its runs and its snapshots, one a line, each with a
number that goes up; ``losses.jsonl`` beside it has the steps (``loss_file.py``). The store stays the truth about
transitions: those that a killed process could not write down are added when the log is opened next::

    JobRun ──▶ note, snapshot, step ─┐
    Manager ──▶ state ───────────────┴─▶ JobLog ──▶ files
                                           ▲ ▲
                            Follower ──────┘ └────── Follower      each takes what is new when it is ready for it

There are no queues: a follower is a place in the log, and only the last steps are kept in memory, so whoever is slow
misses steps, never a state, and holds up nobody. The file is bounded: when it is full, the older half goes, but for the
states. A disk that fails is told to ``trouble`` and ends nothing; what could not be written is tried again.
"""

from __future__ import annotations

import asyncio
import errno
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
from asyncpipe.train.blocking_calls import in_thread

__all__ = ["EventKind", "Follower", "JobEvent", "JobLog", "JobLogs", "LossRow", "read_losses"]

EventKind = Literal["state", "note", "snapshot", "step"]

NAME = "events.jsonl"
MOST_EVENTS = 2000
"""In the file and in memory; half of them stay when there are more."""
MOST_STATES = 500
"""Older states that stay then; the store has all."""
MOST_STEPS = 256
"""Steps that a slow follower can be behind."""
BATCH = 200
"""Events that a follower is given at once."""
MAX_TEXT = 2000


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One thing that happened to a job."""

    id: int
    """Goes up from event to event; where to go on from. A step, kept elsewhere, has that of the event before."""
    at: float
    """Unix time."""
    kind: EventKind
    data: Mapping[str, JSON]
    """``state``: number, from, to, cause. ``note``: level, text. ``snapshot``: step, name. ``step``: step, loss,
    learning_rate, seconds, tokens; these may be infinite or NaN."""


class JobLog:
    """The log of one job. ``open`` and ``close`` block; everything else belongs to one loop and raises nothing."""

    def __init__(
        self, folder: Path, trouble: Callable[[str], object] = lambda text: None, clock: Callable[[], float] = time.time
    ) -> None:
        """``folder`` is the job's, made if it is not there; ``trouble`` is told in a sentence what the disk refused."""
        self._folder = folder
        self._trouble = trouble
        self._clock = clock
        self._events: list[tuple[int, JobEvent]] = []
        """With their ticks, which count events and steps alike."""
        self._steps: deque[tuple[int, JobEvent]] = deque(maxlen=MOST_STEPS)
        self._tick = 0
        self._states = 0
        """How many transitions were written down, those that are gone from the file included."""
        self._state: JobState | None = None
        self._since = 0.0
        """When it became that; what the store has just told when the log was opened is not told twice."""
        self._file: Any = None
        self._losses: LossFile | None = None
        self._rows: deque[LossRow] = deque(maxlen=MOST_PENDING)
        """Steps that wait for the file to be there."""
        self._is_behind = False
        """Whether the file lacks something, so that all of it has to be written again."""
        self._told: set[str] = set()
        self._closed = False
        self._changed = asyncio.Event()

    # Life

    def open(self) -> None:
        """Read what is there and repair what a killed process left torn. Blocks; called once, before all else."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            text = (self._folder / NAME).read_bytes() if (self._folder / NAME).exists() else b""
            lines = text.split(b"\n")
            for line in lines[:-1]:
                if (event := _parsed(line)) is not None:
                    self._keep(event)
            self._is_behind = bool(lines[-1]) or len(self._events) != len(lines) - 1
            self._file = _open_file(self._folder / NAME)
        except OSError as error:
            self._complain("opened", error)

    def close(self) -> None:
        """Close the files; followers end. Blocks hardly ever."""
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
        """Add the transitions of ``history``, the store's, that are not here."""
        for number, transition in enumerate(history[self._states :], self._states + 1):
            self._add_state(number, transition.from_state, transition.to_state, transition.cause, transition.at)

    # What happens

    def state(self, record: JobRecord) -> None:
        """The job has just become what ``record`` says."""
        if (record.state, record.updated) != (self._state, self._since):
            self._add_state(self._states + 1, self._state, record.state, record.cause, record.updated)

    def note(self, level: int, text: str) -> None:
        """A line of the run, with a level of ``logging``."""
        tidy = text.encode("utf-8", "backslashreplace").decode()
        self._add("note", {"level": level, "text": tidy[:MAX_TEXT]}, self._clock())

    def snapshot(self, step: int, name: str) -> None:
        """A snapshot is on disk, and the store knows."""
        self._add("snapshot", {"step": step, "name": name}, self._clock())

    def step(self, row: LossRow) -> None:
        """A step was done."""
        self._tick += 1
        last = self._events[-1][1].id if self._events else 0
        self._steps.append((self._tick, JobEvent(last, self._clock(), "step", row._asdict())))
        self._wake()
        self._rows.append(row)
        try:
            if self._losses is None:
                self._losses = LossFile(self._folder)
            while self._rows:
                self._losses.append(self._rows.popleft())
            self._told.discard("losses")
        except OSError as error:
            self._complain("losses", error)

    # Those who watch

    def follow(self, after: int = 0) -> Follower:
        """What happened behind event ``after``, and what will; of the steps, those from now on."""
        return Follower(self, after, self._tick)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self._closed or self._state in FINAL_STATES

    def since(self, tick: int, after: int, steps_since: int) -> list[tuple[int, JobEvent]]:
        """At most ``BATCH`` events behind ``tick`` and event ``after``, and steps behind ``steps_since``, in order."""
        # Both are in the order of their ticks; a follower of a quick job asks at every step.
        first = bisect_right(self._events, tick, key=_tick_of)
        events = [(at, event) for at, event in self._events[first:] if event.id > after]
        steps = reversed(list(takewhile(lambda pair: pair[0] > max(tick, steps_since), reversed(self._steps))))
        return list(islice(merge(events, steps, key=_tick_of), BATCH))

    async def news(self, tick: int) -> None:
        """Wait until there is something behind ``tick``, or nothing more will come."""
        while self._tick <= tick and not self.is_over:
            await self._changed.wait()

    # Inside

    def _add_state(self, number: int, from_: JobState | None, to: JobState, cause: str, at: float) -> None:
        self._add("state", {"number": number, "from": from_, "to": to, "cause": cause}, at)

    def _add(self, kind: EventKind, data: Mapping[str, JSON], at: float) -> None:
        event = JobEvent(self._events[-1][1].id + 1 if self._events else 1, at, kind, data)
        self._keep(event)
        if len(self._events) > MOST_EVENTS:
            self._trim()
        try:
            self._write(event)
            self._told.discard("written")
        except OSError as error:
            self._is_behind = True
            self._complain("written", error)
        self._wake()

    def _keep(self, event: JobEvent) -> None:
        self._tick += 1
        self._events.append((self._tick, event))
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
            line = _line(event)
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return
        beside = self._folder / f"{NAME}.incomplete"
        beside.write_bytes(b"".join(_line(each) for _, each in self._events))
        beside.replace(self._folder / NAME)
        if self._file is not None:
            self._file.close()
        self._file = None
        self._file = _open_file(self._folder / NAME)
        self._is_behind = False

    def _complain(self, what: str, error: OSError) -> None:
        # Once, until it works again: a full disk refuses every step.
        if what not in self._told:
            self._told.add(what)
            files = "losses" if what == "losses" else "events"
            self._trouble(f"the job's {files} cannot be written: {error.strerror or error}")

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Follower:
    """A place in a log. ``next`` is of the log's loop, for one caller at a time."""

    def __init__(self, log: JobLog, after: int, now: int) -> None:
        self._log = log
        self._after = after
        self._steps_since = now
        self._tick = 0

    async def next(self) -> list[JobEvent]:
        """What is new, one event at least, waiting for it; nothing where nothing more will come."""
        while True:
            found = self._log.since(self._tick, self._after, self._steps_since)
            if found:
                self._tick = found[-1][0]
                return [event for _, event in found]
            if self._log.is_over:
                return []
            self._tick = self._log._tick
            await self._log.news(self._tick)


class JobLogs:
    """The logs that are in use: those of running jobs, and of jobs that somebody follows. Belongs to one loop."""

    def __init__(self, folder: Path, trouble: Callable[[str, str], object] = lambda job, text: None) -> None:
        """``folder`` has a folder for each job; ``trouble`` is told the job and a sentence."""
        self.folder = folder
        self._trouble = trouble
        self._open: dict[str, JobLog] = {}
        self._users: dict[str, int] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._closed = False

    def of(self, job: str) -> JobLog | None:
        """The log of ``job``, if it is in use."""
        return self._open.get(job)

    @asynccontextmanager
    async def use(self, job: str, history: Callable[[], Awaitable[Sequence[Transition]]]) -> AsyncIterator[JobLog]:
        """The log of ``job``, opened for the first who uses it and closed behind the last; one for all.

        ``history`` asks the store for the job's transitions; what it raises is raised here.
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
            # Nothing is awaited between the answer and its use: a transition that is told meanwhile would come twice.
            log.reconcile(await history())
        except BaseException:
            log.close()
            raise
        return log

    def close(self) -> None:
        """Every follower ends, also those whose log is just being opened: they get what happened so far."""
        self._closed = True
        for log in self._open.values():
            log.close()


def _tick_of(pair: tuple[int, JobEvent]) -> int:
    return pair[0]


def _open_file(path: Path) -> Any:
    # Unbuffered: what is written is the system's when the call returns.
    return path.open("ab", buffering=0)


def _line(event: JobEvent) -> bytes:
    return json.dumps(asdict(event), default=str).encode() + b"\n"


def _parsed(line: bytes) -> JobEvent | None:
    """The event in ``line``; ``None`` for a damaged one."""
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
