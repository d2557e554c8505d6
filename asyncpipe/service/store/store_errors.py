"""Errors of requests to the job store; each can be pickled, and says what would be right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asyncpipe.errors import AsyncpipeError
from asyncpipe.service.job_states import JobState

__all__ = [
    "AmbiguousJobError",
    "IdempotencyConflictError",
    "JobCandidate",
    "PastDeadlineError",
    "QueueFullError",
    "QuotaError",
    "UnknownJobError",
]

MOST_CANDIDATES = 10


class UnknownJobError(AsyncpipeError, LookupError):
    """The store has no job of this id."""

    def __init__(self, job: str) -> None:
        super().__init__(f"there is no job {job!r:.100}; ids are given when jobs are submitted, and listed")
        self.job = job


class PastDeadlineError(AsyncpipeError, ValueError):
    """A job was submitted with a deadline that has passed."""

    def __init__(self, deadline: float) -> None:
        super().__init__(f"the deadline {deadline:.0f} has passed; give a Unix time that is still to come")
        self.deadline = deadline


class JobCandidate(NamedTuple):
    """A job that a text may mean."""

    id: str
    name: str
    state: JobState


class AmbiguousJobError(AsyncpipeError, LookupError):
    """A name, or the beginning of an id, that several jobs have; ``candidates`` are the newest of them."""

    def __init__(self, text: str, candidates: Sequence[JobCandidate]) -> None:
        shown = ", ".join(f"{each.id} ({each.name}, {each.state})" for each in candidates[:MOST_CANDIDATES])
        more = " and others" if len(candidates) > MOST_CANDIDATES else ""
        super().__init__(f"{text!r:.100} may mean any of these jobs: {shown}{more}; name one of them by its id")
        self.text = text
        self.candidates = tuple(candidates[:MOST_CANDIDATES])


class IdempotencyConflictError(AsyncpipeError, ValueError):
    """An idempotency key was used before with another specification; ``job`` is the id of the job that it created."""

    def __init__(self, key: str, job: str) -> None:
        rule = "send the same specification to get that job, or another key to submit a new one"
        super().__init__(f"the idempotency key {key!r} belongs to job {job}, which has another specification; {rule}")
        self.key = key
        self.job = job


class QueueFullError(AsyncpipeError, RuntimeError):
    """The queue is full; the job was not submitted or resumed."""

    def __init__(self, most: int) -> None:
        super().__init__(f"the queue is full: {most} jobs wait; try again when some of them have begun")
        self.most = most


class QuotaError(AsyncpipeError, RuntimeError):
    """A quota of a user or a team does not let a job be queued; the message says which, and what is in use."""
