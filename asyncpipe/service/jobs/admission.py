"""Who begins next: a pure function of who waits, who runs, and what fits.

::

    queued     foreground by age, then background by age ─▶ the first ─▶ is there a place? does it fit into the memory?
                                                              │  yes: begins, and the next one is the first
                                                              └─ no: waits, and with it all behind it

Nobody overtakes: a large job that waits for memory would otherwise wait for ever while small ones come and go. For
the same reason a background job does not begin while a foreground job waits. Only a job that could never run, or that
must be measured first and is not at the head, steps aside: it is told so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from asyncpipe.core.predict.memory import format_bytes

__all__ = ["Admission", "Candidate", "Decision", "decide", "place_of", "too_large"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that waits. ``peaks`` are its bytes at the fullest moment, by device; ``None`` until that is measured."""

    job: str
    submitted: float
    """Unix time; of two at the same time, the smaller id is the older."""
    background: bool = False
    peaks: Mapping[str, int] | None = None


class Admission(Enum):
    """What becomes of a job that waits."""

    BEGIN = "begin"
    WAIT = "wait"
    MEASURE = "measure"
    """It would be next; its memory has to be known first."""
    REFUSE = "refuse"
    """It can never run here."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one job, with a reason that operators read."""

    job: str
    admission: Admission
    reason: str


def place_of(candidate: Candidate) -> tuple[bool, float, str]:
    """What the queue is sorted by: the foreground first, the oldest first."""
    return candidate.background, candidate.submitted, candidate.job


def decide(
    queued: Iterable[Candidate], running: Sequence[Mapping[str, int]], max_running: int, limits: Mapping[str, int]
) -> list[Decision]:
    """A decision for each of ``queued``, in the order in which they are served.

    ``running`` has the peaks of each job that runs; those that begin by these decisions count as well. ``limits`` are
    bytes by device; a device without one takes whatever comes.
    """
    held: Counter[str] = Counter()
    for peaks in running:
        held.update(peaks)
    places = max_running - len(running)
    decisions: list[Decision] = []
    waiting: list[str] = []
    for candidate in sorted(queued, key=place_of):
        decision = _decide_one(candidate, places, max_running, held, limits)
        if decision.admission is not Admission.REFUSE and waiting:
            decision = Decision(candidate.job, Admission.WAIT, _behind(waiting))
        decisions.append(decision)
        if decision.admission is Admission.BEGIN:
            places -= 1
            held.update(candidate.peaks or {})
        elif decision.admission is not Admission.REFUSE:
            waiting.append(candidate.job)
    return decisions


def too_large(peaks: Mapping[str, int], limits: Mapping[str, int]) -> str | None:
    """Why a job of these peaks can never run within these limits; ``None`` if it can."""
    wrong = [
        f"{format_bytes(peak)} on {device}, whose limit is {format_bytes(limits[device])}"
        for device, peak in peaks.items()
        if device in limits and peak > limits[device]
    ]
    return f"needs {' and '.join(wrong)}" if wrong else None


def _decide_one(
    candidate: Candidate, places: int, max_running: int, held: Mapping[str, int], limits: Mapping[str, int]
) -> Decision:
    """What becomes of ``candidate`` if it is the next."""
    peaks = candidate.peaks
    if peaks is not None and (problem := too_large(peaks, limits)) is not None:
        return Decision(candidate.job, Admission.REFUSE, problem)
    if places <= 0:
        return Decision(candidate.job, Admission.WAIT, f"waits for a place: {max_running} jobs run, and no more may")
    if peaks is None:
        return Decision(candidate.job, Admission.MEASURE, "its memory is being measured")
    for device, peak in peaks.items():
        if device in limits and held.get(device, 0) + peak > limits[device]:
            free = max(0, limits[device] - held.get(device, 0))
            need = f"needs {format_bytes(peak)}, {format_bytes(free)} of {format_bytes(limits[device])} are free"
            return Decision(candidate.job, Admission.WAIT, f"waits for memory on {device}: {need}")
    return Decision(candidate.job, Admission.BEGIN, "it is its turn")


def _behind(waiting: Sequence[str]) -> str:
    others = "another job" if len(waiting) == 1 else f"{len(waiting)} other jobs"
    return f"waits behind {others}"
