"""Queued jobs that come after others: who waits for whom, and why in words.

::

    submitted, resumed, retried ──▶ waits ──── all it comes after have finished ──▶ the queue
                                      └─────── one of them has ended otherwise ───▶ failed, with the reason

The store knows for whom each job still waits (``JobRecord.awaits``); it forgets a wait in the transaction in which the
awaited job finishes. So nothing is lost if the process ends in between: here is only what to look at again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncpipe.service.job_states import JobRecord, JobState

__all__ = ["AwaitedJobs", "why_never", "why_not_yet"]


class AwaitedJobs:
    """Which queued jobs wait for which others. Belongs to the service's loop."""

    def __init__(self) -> None:
        self.unchecked: set[str] = set()
        """Jobs to look at in the store: they are new here, or one that they waited for has ended."""
        self._awaits: dict[str, tuple[str, ...]] = {}
        self._waiting: dict[str, set[str]] = {}
        """By the job that they wait for."""

    def put(self, record: JobRecord) -> None:
        """``record`` waits for its ``awaits``; in place of what it waited for before."""
        known = self._awaits.get(record.id)
        if known == record.awaits:
            return
        self.discard(record.id)
        self._awaits[record.id] = record.awaits
        for other in record.awaits:
            self._waiting.setdefault(other, set()).add(record.id)
        self.unchecked.add(record.id)

    def discard(self, job: str) -> None:
        """``job`` waits for none."""
        self.unchecked.discard(job)
        for other in self._awaits.pop(job, ()):
            waiting = self._waiting[other]
            waiting.discard(job)
            if not waiting:
                del self._waiting[other]

    def ended(self, job: str) -> None:
        """``job`` has ended: who waits for it has to be looked at."""
        self.unchecked |= self._waiting.get(job, set())

    def __contains__(self, job: object) -> bool:
        return job in self._awaits


def why_not_yet(awaits: Sequence[str], known: Callable[[str], JobRecord | None]) -> str:
    """Why a job waits that comes after ``awaits``; ``known`` returns those of them that are queued or run."""
    first = known(awaits[0])
    name = awaits[0] if first is None else f"{awaits[0]} ({first.spec.name}), which is {first.state}"
    others = len(awaits) - 1
    more = "" if not others else " and 1 other job" if others == 1 else f" and {others} other jobs"
    return f"comes after job {name}{more}"


def why_never(awaited: str, record: JobRecord | None) -> str | None:
    """Why a job can never begin that comes after ``awaited``, whose ``record`` is this if it is there; or ``None``."""
    if record is None:
        return f"it comes after job {awaited}, which is not there any more"
    how = {
        JobState.FAILED: "has failed",
        JobState.CANCELLED: "was cancelled",
        JobState.QUARANTINED: "is in quarantine",
    }.get(record.state)
    return None if how is None else f"it comes after job {awaited} ({record.spec.name}), which {how}"
