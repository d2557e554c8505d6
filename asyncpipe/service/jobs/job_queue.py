"""The job queue: which queued jobs may start, a pure function of the queue, the running jobs and the memory limits.

::

    queued     foreground by age, then background by age ─▶ the first ─▶ a free place? enough memory?
                                                              │  yes: starts, and the next job is the first
                                                              └─ no: waits, and all jobs behind it wait

No job overtakes another: small jobs that come and go could otherwise keep a large job waiting for ever. For the same
reason no background job starts while a foreground job waits. A job whose memory is unknown is measured when it is the
first. Only a job that can never run does not hold up the queue: it is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from asyncpipe.core.predict.memory import format_bytes

__all__ = ["QueueAction", "Candidate", "QueueDecision", "decide", "place_of", "too_large"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A queued job. ``peaks`` is its peak memory in bytes by device, ``None`` until it is measured."""

    job: str
    submitted: float
    """Unix time; jobs of the same time are ordered by their ids."""
    background: bool = False
    peaks: Mapping[str, int] | None = None


class QueueAction(Enum):
    """What happens to a queued job."""

    BEGIN = "begin"
    WAIT = "wait"
    MEASURE = "measure"
    """It is the first, and its memory has to be measured."""
    REFUSE = "refuse"
    """It can never run within the limits."""


@dataclass(frozen=True, slots=True)
class QueueDecision:
    """What happens to one job, with a reason for operators."""

    job: str
    action: QueueAction
    reason: str


def place_of(candidate: Candidate) -> tuple[bool, float, str]:
    """The sort key of the queue: foreground first, then the oldest."""
    return candidate.background, candidate.submitted, candidate.job


def decide(
    queued: Iterable[Candidate], running: Sequence[Mapping[str, int]], max_running: int, limits: Mapping[str, int]
) -> list[QueueDecision]:
    """A decision for each of ``queued``, in the order of the queue.

    ``running`` holds the peaks of each running job; jobs that start by these decisions count too. ``limits`` are bytes
    by device; a device without a limit is not checked.
    """
    held: Counter[str] = Counter()
    for peaks in running:
        held.update(peaks)
    places = max_running - len(running)
    decisions: list[QueueDecision] = []
    waiting: list[str] = []
    for candidate in sorted(queued, key=place_of):
        decision = _decide_one(candidate, places, max_running, held, limits)
        if decision.action is not QueueAction.REFUSE and waiting:
            decision = QueueDecision(candidate.job, QueueAction.WAIT, _behind(waiting))
        decisions.append(decision)
        if decision.action is QueueAction.BEGIN:
            places -= 1
            held.update(candidate.peaks or {})
        elif decision.action is not QueueAction.REFUSE:
            waiting.append(candidate.job)
    return decisions


def too_large(peaks: Mapping[str, int], limits: Mapping[str, int]) -> str | None:
    """Why a job with these peaks can never run within these limits; ``None`` if it can."""
    wrong = [
        f"{format_bytes(peak)} on {device}, whose limit is {format_bytes(limits[device])}"
        for device, peak in peaks.items()
        if device in limits and peak > limits[device]
    ]
    return f"needs {' and '.join(wrong)}" if wrong else None


def _decide_one(
    candidate: Candidate, places: int, max_running: int, held: Mapping[str, int], limits: Mapping[str, int]
) -> QueueDecision:
    """What happens to ``candidate`` if it is the first in the queue."""
    peaks = candidate.peaks
    if peaks is not None and (problem := too_large(peaks, limits)) is not None:
        return QueueDecision(candidate.job, QueueAction.REFUSE, problem)
    if places <= 0:
        reason = f"waits for a place: {max_running} jobs are running, the limit"
        return QueueDecision(candidate.job, QueueAction.WAIT, reason)
    if peaks is None:
        return QueueDecision(candidate.job, QueueAction.MEASURE, "its memory is being measured")
    for device, peak in peaks.items():
        if device in limits and held.get(device, 0) + peak > limits[device]:
            free = max(0, limits[device] - held.get(device, 0))
            need = f"needs {format_bytes(peak)}, {format_bytes(free)} of {format_bytes(limits[device])} are free"
            return QueueDecision(candidate.job, QueueAction.WAIT, f"waits for memory on {device}: {need}")
    return QueueDecision(candidate.job, QueueAction.BEGIN, "it is its turn")


def _behind(waiting: Sequence[str]) -> str:
    others = "another job" if len(waiting) == 1 else f"{len(waiting)} other jobs"
    return f"waits behind {others}"
