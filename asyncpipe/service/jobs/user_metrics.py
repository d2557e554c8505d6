"""What users have of a service, for its metrics: devices and jobs that wait.

The first ``MOST_USERS`` users that are seen have names of their own, and all others share ``other``: so a series never
loses what it has counted. A job without an owner counts to nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from threading import Lock

from asyncpipe.service.job_states import JobRecord
from asyncpipe.service.jobs.quotas import devices_of

__all__ = ["MOST_USERS", "UserMetrics"]

MOST_USERS = 20


class UserMetrics:
    """What users have; any thread may call any method."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._queued: dict[str, str] = {}
        """By job, the user's name."""
        self._running: dict[str, tuple[str, int]] = {}
        """By job, the user's name and how many devices."""
        self._lock = Lock()

    def queued(self, record: JobRecord) -> None:
        """The job of ``record`` waits."""
        with self._lock:
            if record.owner is not None:
                self._queued[record.id] = self._name(record.owner)

    def unqueued(self, job: str) -> None:
        """``job`` waits no more."""
        with self._lock:
            self._queued.pop(job, None)

    def began(self, record: JobRecord) -> None:
        """The job of ``record`` has its devices from now on."""
        with self._lock:
            if record.owner is not None:
                self._running[record.id] = self._name(record.owner), devices_of(record)

    def ended(self, job: str) -> None:
        """``job`` has no devices any more."""
        with self._lock:
            self._running.pop(job, None)

    def now(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """By name: the devices of running jobs, and queued jobs."""
        with self._lock:
            zero = dict.fromkeys(self._names.values(), 0.0)
            devices = Counter(name for name, count in self._running.values() for _ in range(count))
            return zero | devices, zero | Counter(self._queued.values())

    def _name(self, user: str) -> str:
        shared = user not in self._names and len(set(self._names.values())) >= MOST_USERS
        return self._names.setdefault(user, "other" if shared else user)
