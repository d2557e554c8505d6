"""The job queue: which queued job begins next, where, and why the others wait.

::

    foreground, then background ─▶ the user who has used least ─▶ priority ─▶ age ─▶ the first ─▶ a place? devices?
                                                                              │  yes: begins on those of place()
                                                                              └─ no: waits; jobs behind it are looked
                                                                                 at only where it waits for devices

**Order.** The k-th waiting job of a user has the place of the user's rank (``usage.py``) plus k, divided by the user's
share: the jobs come in the order in which they would begin if each counted like one device. Where jobs have no owners,
all of a class are one user's, and begin by priority and age.

**Passing.** A job that waits for devices does not keep back those behind it: what is free of the devices that it waits
for may be used meanwhile. That is bounded. Each time a job behind it begins on a device that it would have, it has been
*passed*; when it has been passed ``PASSES`` times, these devices are *held* for it, and no job behind it begins there.

*Theorem.* Once a job is the first of its order and was passed ``PASSES`` times, it begins, if it names its devices or
any number of hosts will do, as soon as the jobs have ended that use the held devices then; and with ``hosts``, after at
most ``count`` times the longest run. *Proof.* Only the first job itself takes held devices, so they are never used by
more jobs than before. Devices are held in place of others only if fewer of these are used: without ``hosts``, they are
then all that are free, and each job that ends adds some; with ``hosts``, each change leaves fewer to be waited for, and
there are at most ``count``. A running job that ends gives back its place (``max_running``) with its devices. ∎

Hence a job waits for at most ``PASSES`` jobs that came behind it and took its devices, and for those that ran.

Where no more jobs may run, and where a job has to run alone, all jobs behind it wait. Such a job lets those pass that
came before it or within ``PATIENCE_SECONDS`` after it, and no others: it has its turn as well. Only the first few jobs
are looked at, and the others need only the number of jobs before them: nothing here takes longer in a queue of
thousands.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import merge
from itertools import islice
from typing import TypeAlias

from asyncpipe.core.predict.memory import format_bytes
from asyncpipe.service.job_states import DeviceRequest, JobRecord
from asyncpipe.service.jobs.placement import Apart, index_apart, place, why_there
from asyncpipe.service.jobs.usage import Usage

__all__ = [
    "LOOK_AHEAD",
    "PASSES",
    "Candidate",
    "Capacity",
    "JobQueue",
    "QueueAction",
    "QueueDecision",
    "decisions",
    "why_behind",
]

LOOK_AHEAD, MOST_ALIKE = 32, 128
"""How many jobs of the queue are looked at that want different things, and how many in all, the first included."""
PASSES = 32
"""How many jobs may begin on devices that a job before them waits for, until these are held for it."""
PATIENCE_SECONDS = 3600.0
"""How long a job that has to run alone gives way to others, which need not wait until no job runs."""
BACKGROUND_LOAD = 1 / 64
"""What a job counts as on its devices that has only the time that others leave."""

_Place: TypeAlias = tuple[int, float, str]
"""Of a job among those of its class and user: by priority, the oldest, then by id."""
_Line: TypeAlias = tuple[bool, str | None]
"""Whether the jobs are background ones, and whose they are."""


@dataclass(frozen=True, slots=True)
class _Places:
    """The places of the jobs of a class and user among those of all users of the class."""

    rank: float
    step: float
    line: list[_Place]

    def __getitem__(self, number: int) -> tuple[float, _Place]:
        return self.rank + number * self.step, self.line[number]

    def __iter__(self) -> Iterator[tuple[float, _Place]]:
        return map(self.__getitem__, range(len(self.line)))

    def before(self, other: tuple[float, _Place]) -> int:
        """How many are before the place ``other``."""
        return bisect_left(range(len(self.line)), other, key=self.__getitem__)


class JobQueue:
    """The queued jobs in their order: foreground first, then by what users have used, priority, age and id."""

    def __init__(self, usage: Usage | None = None) -> None:
        self.usage = usage or Usage()
        self._lines: dict[_Line, list[_Place]] = {}
        self._jobs: dict[str, tuple[_Line, _Place, JobRecord]] = {}
        self._passed: dict[str, tuple[int, tuple[str, ...]]] = {}
        """By job, how often it was passed, and what is held for it."""

    def put(self, record: JobRecord, *, alone: bool = False) -> None:
        """Let the job of ``record`` wait, perhaps to run ``alone``; it may have waited with another record."""
        passed = self._passed.get(record.id)
        self.discard(record.id)
        since = record.updated + PATIENCE_SECONDS if alone else record.submitted
        line, place_ = (record.is_background, record.owner), (-record.priority, since, record.id)
        self._jobs[record.id] = line, place_, record
        insort(self._lines.setdefault(line, []), place_)
        if passed is not None:
            self._passed[record.id] = passed

    def discard(self, job: str) -> None:
        """Remove ``job`` from the queue, if it is there."""
        self._passed.pop(job, None)
        if (found := self._jobs.pop(job, None)) is not None:
            line, place_, _ = found
            waiting = self._lines[line]
            del waiting[bisect_left(waiting, place_)]
            if not waiting:
                del self._lines[line]

    def get(self, job: str) -> JobRecord | None:
        """The record of ``job``, if it waits."""
        return None if (found := self._jobs.get(job)) is None else found[2]

    def ordered(self, now: float = 0.0) -> Iterator[JobRecord]:
        """The jobs in their order, by what users have used until ``now``."""
        for is_background in (False, True):
            for _, (*_, job) in merge(*self._ranked(is_background, now)):
                yield self._jobs[job][2]

    def before(self, job: str, now: float = 0.0) -> int:
        """How many wait before ``job``, which waits as well."""
        (is_background, user), place_, _ = self._jobs[job]
        own = self._places((is_background, user), now)
        mine = own[bisect_left(own.line, place_)]
        found = sum(len(line) for (background, _), line in self._lines.items() if is_background and not background)
        return found + sum(each.before(mine) for each in self._ranked(is_background, now))

    def _ranked(self, is_background: bool, now: float) -> Iterator[_Places]:
        return (self._places(line, now) for line in self._lines if line[0] is is_background)

    def _places(self, line: _Line, now: float) -> _Places:
        return _Places(self.usage.rank(line[1], now), 1 / self.usage.share(line[1]), self._lines[line])

    def passed(self, job: str) -> tuple[int, tuple[str, ...]]:
        """How often ``job`` was passed, and the devices that are held for it, if any are."""
        return self._passed.get(job, (0, ()))

    def follow(self, decision: QueueDecision) -> None:
        """Remember what follows from ``decision``: which jobs are passed, and what is held for them."""
        if decision.held:
            self._passed[decision.job] = self.passed(decision.job)[0], decision.held
        for job in decision.passes:
            times, held = self.passed(job)
            self._passed[job] = times + 1, held

    def __contains__(self, job: object) -> bool:
        return job in self._jobs

    def __len__(self) -> int:
        return len(self._jobs)


@dataclass(frozen=True, slots=True)
class Candidate:
    """What decides whether a job can run beside others."""

    job: str
    request: DeviceRequest
    memory: int = 0
    """The bytes that it has declared to need on each of its devices."""
    is_suspect: bool = False
    """Whether it has one attempt left, and has to be alone so that no other job is blamed."""
    devices: tuple[str, ...] = ()
    """Where it runs, if it does."""
    load: float = 1.0
    """How much it wants of their time."""
    passed: int = 0
    """How often it was passed, if it waits."""
    held: tuple[str, ...] = ()
    """What is held for it then."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a service has for jobs."""

    devices: Sequence[str]
    """Each once for each time that a job may have it."""
    max_running: int
    share_devices: bool
    limits: Mapping[str, int] = field(default_factory=dict)
    """Bytes by device, which the declared memory of the jobs there does not exceed together."""
    drained: Collection[str] = ()
    """Devices that jobs are to leave; who asks for any gets others."""
    apart: Apart = index_apart


class QueueAction(Enum):
    """What happens to a queued job."""

    BEGIN = "begin"
    WAIT = "wait"
    """It waits for devices or their memory, and jobs behind it need not."""
    HOLD = "hold"
    """It waits, and so do all jobs behind it."""
    FULL = "full"
    """It waits, as any other would: no more jobs may run."""


@dataclass(frozen=True, slots=True)
class QueueDecision:
    """What happens to one job, with a reason for operators."""

    job: str
    action: QueueAction
    reason: str
    devices: tuple[str, ...] = ()
    """Where it begins."""
    passes: tuple[str, ...] = ()
    """The jobs that wait for some of these."""
    held: tuple[str, ...] = ()
    """What is held for it while it waits."""


def decisions(waiting: Iterable[Candidate], running: Iterable[Candidate], has: Capacity) -> Iterator[QueueDecision]:
    """What happens to the ``waiting`` jobs, in their order, as far as they need to be looked at.

    The last decision is the first one that is not ``WAIT``: at most one job begins. The same jobs have the same ones.
    """
    floor = _Floor(list(running), has)
    for job in islice(waiting, MOST_ALIKE):
        found = floor.decide(job)
        yield found
        if found.action is not QueueAction.WAIT or len(floor.alike) >= LOOK_AHEAD:
            return


@dataclass(slots=True)
class _Floor:
    """The devices of a service, who uses them, and what jobs that were looked at wait for."""

    running: list[Candidate]
    has: Capacity
    load: dict[str, float] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    """The bytes that jobs may still declare, by device."""
    taken: dict[str, str] = field(default_factory=dict)
    """Why a device cannot be had, by device."""
    held: dict[str, str] = field(default_factory=dict)
    wanted: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By job that may be passed, the devices that it would have."""
    hopes: dict[tuple[DeviceRequest, tuple[str, ...], tuple[str, ...]], tuple[str, ...]] = field(default_factory=dict)
    """By what a job asks for, could have and can have now, the devices that it would have."""
    alike: dict[tuple[DeviceRequest, int], QueueDecision] = field(default_factory=dict)
    """By what a job wants that waits, what was decided about it."""

    def __post_init__(self) -> None:
        self.left.update(self.has.limits)
        for each in self.running:
            for device in dict.fromkeys(each.devices):
                self.load[device] = self.load.get(device, 0.0) + each.load
                if device in self.left:
                    self.left[device] -= each.memory
                if not self.has.share_devices:
                    self.taken[device] = f"job {each.job} has to itself"

    def decide(self, job: Candidate) -> QueueDecision:
        """What happens to ``job``, behind those that were looked at before."""
        if len(self.running) >= self.has.max_running:
            return QueueDecision(job.job, QueueAction.FULL, f"max_running {self.has.max_running} is reached")
        if job.is_suspect and self.running:
            reason = "waits to run alone: the service has died while it ran, and quarantines it the next time"
            return QueueDecision(job.job, QueueAction.HOLD, reason)
        for other in self.running:
            if other.is_suspect:
                alone = "which runs alone until its next snapshot: the service has died while it ran"
                return QueueDecision(job.job, QueueAction.HOLD, f"waits for job {other.job}, {alone}")
        request = job.request
        like = self.alike.get((request, job.memory))
        if like is not None and (like.held or job.passed < PASSES):  # What it would have is that job's first.
            if job.passed < PASSES:
                self.wanted[job.job] = like.held or self.wanted[like.job]
            return QueueDecision(job.job, QueueAction.WAIT, like.reason)
        there = request.names or [each for each in self.has.devices if each not in self.has.drained]
        free = [each for each in there if each not in self.taken and job.memory <= self.left.get(each, job.memory)]
        usable = [each for each in free if each not in self.held]
        # What jobs before it would have is chosen last.
        load = {each: 2.0**-20 for devices in self.wanted.values() for each in devices} | self.load
        placed = place(request, usable, load, self.has.apart)
        if placed is not None:
            passes = tuple(each for each, devices in self.wanted.items() if not set(placed).isdisjoint(devices))
            reason = "it is its turn" + ("" if request.names else f", {why_there(placed, self.load, self.left)}")
            return QueueDecision(job.job, QueueAction.BEGIN, reason, placed, passes)
        fitting = [each for each in self.has.devices if job.memory <= self.has.limits.get(each, job.memory)]
        if not request.names and not request.fits(fitting):  # The service had more when it was submitted.
            return QueueDecision(job.job, QueueAction.BEGIN, "it can never be placed")
        return self._wait(job, [each for each in there if each in fitting], free, usable)

    def _wait(self, job: Candidate, could: list[str], free: list[str], usable: list[str]) -> QueueDecision:
        hope = job.request, tuple(could), tuple(free)
        if hope not in self.hopes:
            used = {each: 1.0 for each in could if each not in free}
            self.hopes[hope] = place(job.request, could, used, self.has.apart) or ()
        wanted = self.hopes[hope]

        def missing(devices: tuple[str, ...]) -> int:
            return sum(each not in free for each in devices)

        if set(job.held) <= set(could) and missing(job.held) <= missing(wanted):
            wanted = job.held or wanted
        held, reason = wanted if job.passed >= PASSES else (), self._why(job, free, usable)
        if held:
            self.held |= {each: f"job {job.job} before it waits for" for each in held if each not in self.held}
        else:
            self.wanted[job.job] = wanted
        found = QueueDecision(job.job, QueueAction.WAIT, reason, held=held)
        self.alike.setdefault((job.request, job.memory), found)
        return found

    def _why(self, job: Candidate, free: list[str], usable: list[str]) -> str:
        if not job.request.names:
            text = f"waits for {job.request}: {len(free)} of {len(self.has.devices)} are free"
            held = [self.held[each] for each in free if each in self.held]
            return text + (f", {len(held)} of them {held[0]}" if held else "")
        busy = self.held | self.taken
        if names := sorted({*job.request.names} & busy.keys()):
            return f"waits for {', '.join(names)}, which {busy[names[0]]}"
        device = next(each for each in sorted(job.request.names) if each not in free)
        limit, left = self.has.limits.get(device, 0), self.left.get(device, 0)
        needs = f"needs {format_bytes(job.memory)}, {format_bytes(left)} of {format_bytes(limit)} are free"
        return f"waits for memory on {device}: {needs}"


def why_behind(first: QueueDecision, last: QueueDecision, before: int) -> str:
    """Why a job waits that was not looked at, with ``before`` jobs before it; one sentence.

    ``first`` and ``last`` are the decisions about the first job and the last one that was looked at.
    """
    if last.action is QueueAction.FULL:
        return f"{last.reason}; {before} before it"
    if last.action is QueueAction.BEGIN:
        return f"{before} before it, of which {'the first' if first is last else 'one'} begins"
    return f"{before} before it; the first of them: {first.reason}"
