"""Quotas: what users and teams may have of a service, and have.

::

    running devices    a queued job waits while its owner's jobs, or its team's, have too many
    queued jobs        the store refuses one more, in the transaction that would add it
    bytes on disk      measured before a submission, which is refused if there are too many

A job counts to its owner, and to each team of the owner. Jobs without an owner have no quota.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from asyncpipe.core.predict.memory import format_bytes
from asyncpipe.service.access import Whose
from asyncpipe.service.job_states import DeviceRequest, JobRecord
from asyncpipe.service.jobs.job_folder import files_of
from asyncpipe.service.settings.quota_settings import Quota
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.store.finding import count_queued
from asyncpipe.service.store.job_store import JobStore
from asyncpipe.service.store.store_errors import QueueFullError, QuotaError
from asyncpipe.train.blocking_calls import in_thread

__all__ = ["Limit", "Quotas", "devices_of", "devices_wanted"]


class Limit(NamedTuple):
    """What the jobs of ``whose`` may have together."""

    name: str
    """As "alice", or "the team vision"."""
    whose: Whose
    quota: Quota


def devices_wanted(document: Mapping[str, Any]) -> int:
    """How many devices a job with this document has when it runs."""
    request = DeviceRequest.of(document.get("pipeline", {}).get("devices", ()))
    return len(set(request.names)) or request.count


def devices_of(job: JobRecord) -> int:
    """How many devices the running ``job`` has."""
    return len(set(job.placed)) or devices_wanted(job.document)


class Quotas:
    """The quotas of ``settings`` for the jobs in ``store``, which have their folders in ``folder``."""

    def __init__(self, settings: ServiceSettings, store: JobStore, folder: Path) -> None:
        self._settings = settings
        self._store = store
        self._folder = folder
        self._sizes: dict[Whose, dict[str, tuple[object, int]]] = {}
        """Of each job what its folder looked like when it was measured, and its bytes."""

    def limits(self, owner: str | None, teams: Collection[str]) -> list[Limit]:
        """What holds for jobs of ``owner``, who is in ``teams``."""
        if owner is None:
            return []
        quotas = self._settings.quotas
        of_teams = {team: quota for team, quota in quotas.teams.items() if team in teams}
        found = [Limit(f"the team {team}", Whose(None, (team,)), quota) for team, quota in of_teams.items()]
        return [Limit(owner, Whose(owner), quotas.of_user(owner)), *found]

    def may_begin(self, running: Iterable[JobRecord]) -> Callable[[JobRecord], str | None]:
        """A function that says why a queued job may not begin beside those that run; ``None`` if it may."""
        running = list(running)

        @cache  # Thousands of jobs may be of one user.
        def held_back(owner: str | None, teams: tuple[str, ...], wanted: int) -> str | None:
            for name, whose, quota in self.limits(owner, teams):
                used = sum(devices_of(job) for job in running if whose.has(job.owner, job.teams))
                if (most := quota.running_devices) is not None and used + wanted > most:
                    return f"needs {wanted} devices, and {name} has {used} of the {most} that its quota allows"
            return None

        return lambda job: held_back(job.owner, job.teams, devices_wanted(job.document))

    def admit(
        self, db: sqlite3.Connection, owner: str | None, teams: Collection[str], document: Mapping[str, Any]
    ) -> None:
        """Raise ``QueueFullError`` or ``QuotaError`` if one more job of ``owner`` is not to be queued.

        Called in the store's thread.
        """
        if count_queued(db) >= self._settings.max_queued:
            raise QueueFullError(self._settings.max_queued)
        wanted = devices_wanted(document)
        for name, whose, quota in self.limits(owner, teams):
            if quota.running_devices is not None and wanted > quota.running_devices:
                may = f"may have {quota.running_devices} at a time: ask for fewer"
                raise QuotaError(f"the job needs {wanted} devices, and {name} {may}")
            if quota.queued is not None and count_queued(db, whose) >= quota.queued:
                rest = "try again when some of them have begun"
                raise QuotaError(f"{name} has {quota.queued} queued jobs, which is the quota: {rest}")
            if quota.bytes is not None and (used := self._bytes(whose)) >= quota.bytes:
                of = f"{format_bytes(used)} on disk, and the quota is {format_bytes(quota.bytes)}"
                raise QuotaError(f"the jobs of {name} have {of}: delete some that have ended")

    async def measure(self, owner: str | None, teams: Collection[str]) -> None:
        """Measure the bytes of all jobs that limits on them count. Only what has changed is looked at again."""
        for limit in self.limits(owner, teams):
            if limit.quota.bytes is not None:
                jobs = await self._store.updated(limit.whose)
                before = self._sizes.get(limit.whose, {})
                self._sizes[limit.whose] = await in_thread(lambda: _sizes(self._folder, jobs, before))  # noqa: B023

    def _bytes(self, whose: Whose) -> int:
        return sum(size for _, size in self._sizes.get(whose, {}).values())


def _sizes(
    folder: Path, jobs: Iterable[tuple[str, float]], before: Mapping[str, tuple[object, int]]
) -> dict[str, tuple[object, int]]:
    """What the folders of ``jobs`` look like, which have been updated then, and their bytes. Blocks."""
    found = {}
    for job, updated in jobs:
        with suppress(FileNotFoundError):
            look = updated, (folder / job).stat().st_mtime_ns  # Which changes when its snapshots are removed.
            is_known = job in before and before[job][0] == look
            found[job] = before[job] if is_known else (look, files_of(folder / job).bytes)
    return found
