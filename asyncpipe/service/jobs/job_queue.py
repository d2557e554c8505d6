"""The job queue: which queued job begins next, and why the others wait.

::

    queued     foreground by age, then background by age ─▶ the first ─▶ a free place? its devices free?
                                                              │  yes: begins
                                                              └─ no: waits; jobs behind it are looked at only where
                                                                 it waits for devices

A job that waits for busy devices does not keep back one whose devices are free: up to ``LOOK_AHEAD`` jobs are looked
at. Nobody starves. A job that begins out of turn takes no device that a job before it wants, and each running job that
the first one waits for gives back its place together with its devices. So the first job begins as soon as those that
had its devices when it became the first have ended.

Where no more jobs may run, and where a job has to run alone, all jobs behind it wait. Such a job lets those pass that
came before it or within ``PATIENCE_SECONDS`` after it, and no others: it has its turn as well. Only the first few jobs
are looked at, and the others need only the number of jobs before them: nothing here takes longer in a queue of
thousands.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from types import MappingProxyType
from typing import TypeAlias

from asyncpipe.core.predict.memory import format_bytes
from asyncpipe.service.job_states import JobRecord

__all__ = ["LOOK_AHEAD", "Candidate", "JobQueue", "QueueAction", "QueueDecision", "decisions", "why_behind"]

LOOK_AHEAD = 32
"""How many jobs of the queue are looked at, the first included."""
PATIENCE_SECONDS = 3600.0
"""How long a job that has to run alone gives way to others, which need not wait until no job runs."""

_Place: TypeAlias = tuple[bool, float, str]


class JobQueue:
    """The queued jobs in their order: foreground first, then the oldest, then by id."""

    def __init__(self) -> None:
        self._order: list[_Place] = []
        self._jobs: dict[str, tuple[_Place, JobRecord]] = {}

    def put(self, record: JobRecord, *, alone: bool = False) -> None:
        """Let the job of ``record`` wait, perhaps to run ``alone``; it may have waited with another record."""
        self.discard(record.id)
        since = record.updated + PATIENCE_SECONDS if alone else record.submitted
        place = (record.is_background, since, record.id)
        self._jobs[record.id] = place, record
        insort(self._order, place)

    def discard(self, job: str) -> None:
        """Remove ``job`` from the queue, if it is there."""
        if (found := self._jobs.pop(job, None)) is not None:
            del self._order[bisect_left(self._order, found[0])]

    def get(self, job: str) -> JobRecord | None:
        """The record of ``job``, if it waits."""
        return None if (found := self._jobs.get(job)) is None else found[1]

    def first(
        self, count: int = LOOK_AHEAD, held_back: Callable[[JobRecord], str | None] = lambda _: None
    ) -> list[JobRecord]:
        """The first ``count`` jobs of those that nothing holds back."""
        waiting = (self._jobs[job][1] for _, _, job in self._order)
        return list(islice((job for job in waiting if held_back(job) is None), count))

    def before(self, job: str) -> int:
        """How many wait before ``job``, which waits as well."""
        return bisect_left(self._order, self._jobs[job][0])

    def __contains__(self, job: object) -> bool:
        return job in self._jobs

    def __len__(self) -> int:
        return len(self._order)


@dataclass(frozen=True, slots=True)
class Candidate:
    """What decides whether a job can run beside others."""

    job: str
    devices: frozenset[str] = frozenset()
    memory: int = 0
    """The bytes that it has declared to need on each of them."""
    is_suspect: bool = False
    """Whether it has one attempt left, and has to be alone so that no other job is blamed."""


class QueueAction(Enum):
    """What happens to a queued job."""

    BEGIN = "begin"
    WAIT = "wait"
    """It waits for devices or their memory, and jobs with other devices need not."""
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


def decisions(
    waiting: Iterable[Candidate],
    running: Iterable[Candidate],
    max_running: int,
    *,
    share_devices: bool,
    limits: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[QueueDecision]:
    """What happens to the ``waiting`` jobs, in their order, as far as they need to be looked at.

    ``limits`` are bytes by device, which the declared memory of the jobs there does not exceed together. The last
    decision is the first one that is not ``WAIT``: at most one job begins.
    """
    running = list(running)
    taken = (
        {}
        if share_devices
        else {device: f"job {each.job} has to itself" for each in running for device in each.devices}
    )
    for job in waiting:
        found = _decide(job, running, taken, max_running, limits)
        yield found
        if found.action is not QueueAction.WAIT:
            return
        for device in job.devices:
            taken.setdefault(device, f"job {job.job} before it waits for")


def _decide(
    job: Candidate, running: list[Candidate], taken: Mapping[str, str], max_running: int, limits: Mapping[str, int]
) -> QueueDecision:
    if len(running) >= max_running:
        return QueueDecision(job.job, QueueAction.FULL, f"max_running {max_running} is reached")
    if job.is_suspect and running:
        reason = "waits to run alone: the service has died while it ran, and quarantines it the next time"
        return QueueDecision(job.job, QueueAction.HOLD, reason)
    for other in running:
        if other.is_suspect:
            alone = "which runs alone until its next snapshot: the service has died while it ran"
            return QueueDecision(job.job, QueueAction.HOLD, f"waits for job {other.job}, {alone}")
    if busy := sorted(job.devices & taken.keys()):
        return QueueDecision(job.job, QueueAction.WAIT, f"waits for {', '.join(busy)}, which {taken[busy[0]]}")
    for device in sorted(job.devices & limits.keys()):
        free = limits[device] - sum(each.memory for each in running if device in each.devices)
        if job.memory > free:
            needs = f"needs {format_bytes(job.memory)}, {format_bytes(free)} of {format_bytes(limits[device])} are free"
            return QueueDecision(job.job, QueueAction.WAIT, f"waits for memory on {device}: {needs}")
    return QueueDecision(job.job, QueueAction.BEGIN, "it is its turn")


def why_behind(first: QueueDecision, last: QueueDecision, before: int) -> str:
    """Why a job waits that was not looked at, with ``before`` jobs before it; one sentence.

    ``first`` and ``last`` are the decisions about the first job and the last one that was looked at.
    """
    if last.action is QueueAction.FULL:
        return f"{last.reason}; {before} before it"
    if last.action is QueueAction.BEGIN:
        return f"{before} before it, of which {'the first' if first is last else 'one'} begins"
    return f"{before} before it; the first of them: {first.reason}"
