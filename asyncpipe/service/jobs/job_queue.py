"""The job queue: which queued job is the first, whether it may start, and why the others wait.

::

    queued     foreground by age, then background by age ─▶ the first ─▶ a free place? enough memory?
                                                              │  yes: starts, and the next job is the first
                                                              └─ no: waits, and all jobs behind it wait

No job overtakes another: small jobs that come and go could otherwise keep a large job waiting for ever. For the same
reason no background job starts while a foreground job waits. A job whose memory is unknown is measured when it is the
first. Only a job that can never run does not hold up the queue: it is refused when it is the first.

So only the first job is looked at, and the others only need to know how many are before them: nothing here takes
longer in a queue of thousands.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from asyncpipe.core.predict.memory import format_bytes

__all__ = [
    "Candidate",
    "JobQueue",
    "Neighbour",
    "QueueAction",
    "QueueDecision",
    "decide",
    "too_large",
    "why_apart",
    "why_behind",
]

_Place: TypeAlias = tuple[bool, float, str]


class JobQueue:
    """The ids of queued jobs in their order: foreground first, then the oldest, then by id."""

    def __init__(self) -> None:
        self._order: list[_Place] = []
        self._places: dict[str, _Place] = {}

    def put(self, job: str, submitted: float, *, background: bool) -> None:
        """Let ``job`` wait, from now on at this place if it waited elsewhere. ``submitted`` is a Unix time."""
        self.discard(job)
        self._places[job] = place = (background, submitted, job)
        insort(self._order, place)

    def discard(self, job: str) -> None:
        """``job`` waits no more; nothing if it did not."""
        if (place := self._places.pop(job, None)) is not None:
            del self._order[bisect_left(self._order, place)]

    @property
    def first(self) -> str | None:
        """The job whose turn it is, if any waits."""
        return self._order[0][2] if self._order else None

    def before(self, job: str) -> int:
        """How many wait before ``job``, which waits as well."""
        return bisect_left(self._order, self._places[job])

    def __contains__(self, job: object) -> bool:
        return job in self._places

    def __len__(self) -> int:
        return len(self._order)


@dataclass(frozen=True, slots=True)
class Candidate:
    """The first job of the queue. ``peaks`` is its peak memory in bytes by device, ``None`` until it is measured."""

    job: str
    peaks: Mapping[str, int] | None = None
    apart: str | None = None
    """Why it cannot run beside those that run now (``why_apart``)."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What decides whether a job can run beside others."""

    devices: frozenset[str]
    is_suspect: bool = False
    """Whether it has one attempt left, and has to be alone so that no other job is blamed."""


class QueueAction(Enum):
    """What happens to the first job of the queue."""

    BEGIN = "begin"
    WAIT = "wait"
    FULL = "full"
    """It waits, as any other would: no more jobs may run."""
    MEASURE = "measure"
    """Its memory has to be measured."""
    REFUSE = "refuse"
    """It can never run within the limits."""


@dataclass(frozen=True, slots=True)
class QueueDecision:
    """What happens to one job, with a reason for operators."""

    job: str
    action: QueueAction
    reason: str


def decide(
    first: Candidate, running: Sequence[Mapping[str, int]], max_running: int, limits: Mapping[str, int]
) -> QueueDecision:
    """What happens to the ``first`` job of the queue now.

    ``running`` holds the peaks of each running job. ``limits`` are bytes by device; a device without a limit is not
    checked.
    """
    peaks = first.peaks
    if peaks is not None and (problem := too_large(peaks, limits)) is not None:
        return QueueDecision(first.job, QueueAction.REFUSE, problem)
    if len(running) >= max_running:
        return QueueDecision(first.job, QueueAction.FULL, f"max_running {max_running} is reached")
    if first.apart is not None:
        return QueueDecision(first.job, QueueAction.WAIT, first.apart)
    if peaks is None:
        return QueueDecision(first.job, QueueAction.MEASURE, "its memory is being measured")
    held: Counter[str] = Counter()
    for each in running:
        held.update(each)
    for device, peak in peaks.items():
        if device in limits and held[device] + peak > limits[device]:
            free = max(0, limits[device] - held[device])
            need = f"needs {format_bytes(peak)}, {format_bytes(free)} of {format_bytes(limits[device])} are free"
            return QueueDecision(first.job, QueueAction.WAIT, f"waits for memory on {device}: {need}")
    return QueueDecision(first.job, QueueAction.BEGIN, "it is its turn")


def why_apart(job: Neighbour, running: Mapping[str, Neighbour], *, share_devices: bool) -> str | None:
    """Why ``job`` cannot run beside ``running``; ``None`` if it can."""
    if job.is_suspect and running:
        return "waits to run alone: the service has died while it ran, and quarantines it the next time"
    for other, each in running.items():
        if each.is_suspect:
            return f"waits for job {other}, which runs alone until its next snapshot: the service has died while it ran"
        if not share_devices and (common := sorted(job.devices & each.devices)):
            return f"waits for {', '.join(common)}, which job {other} has to itself"
    return None


def why_behind(first: QueueDecision, before: int) -> str:
    """Why a job waits that has ``before`` jobs before it, of which the ``first`` one is decided; one sentence."""
    if first.action is QueueAction.FULL:
        return f"{first.reason}; {before} before it"
    if first.action is QueueAction.BEGIN:
        return f"{before} before it, of which the first begins"
    return f"{before} before it; the first of them: {first.reason}"


def too_large(peaks: Mapping[str, int], limits: Mapping[str, int]) -> str | None:
    """Why a job with these peaks can never run within these limits; ``None`` if it can."""
    wrong = [
        f"{format_bytes(peak)} on {device}, whose limit is {format_bytes(limits[device])}"
        for device, peak in peaks.items()
        if device in limits and peak > limits[device]
    ]
    return f"needs {' and '.join(wrong)}" if wrong else None
