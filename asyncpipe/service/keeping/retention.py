"""Deletes what the rules of retention do not keep of jobs that have ended.

::

    ended jobs, the newest first    ■ ■ ■ ■ ■ ■ ■ ■ ■ ■
    days = 30, count = 8            ──── kept ────┊ ▲ ▲     the rest goes: what is older, or too many

Whole jobs go first, then the snapshots of those that stay. ``removals`` decides and is pure; ``Retainer`` applies it
while a service runs, every ``every_seconds``, each removal under its job's turn.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from asyncpipe.errors import AsyncpipeError
from asyncpipe.runtime.thread_calls import set_within
from asyncpipe.service.job_states import FINAL_STATES, JobStateError
from asyncpipe.service.jobs.job_folder import SNAPSHOTS
from asyncpipe.service.jobs.manager import Manager
from asyncpipe.service.settings.retention_settings import RetentionRule, RetentionSettings
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.store.finding import JobHead
from asyncpipe.service.store.job_store import UnknownJobError
from asyncpipe.train.blocking_calls import in_thread

__all__ = ["Removal", "Retainer", "removals", "with_snapshots"]

DAY = 86400.0
FIRST_SECONDS = 5.0
"""Until the rules are applied for the first time."""

_logger = logging.getLogger(__name__)


class Removal(NamedTuple):
    """Something that is not kept."""

    job: str
    name: str
    what: Literal["job", "snapshots"]
    reason: str


def removals(
    jobs: Iterable[JobHead], rules: RetentionSettings, now: float, have_snapshots: Callable[[str], bool]
) -> list[Removal]:
    """What of ``jobs`` is not kept at the Unix time ``now``; nothing of a job that has not ended.

    ``have_snapshots`` says of the id of a job whether it has snapshots.
    """
    ended = [job for job in jobs if job.state in FINAL_STATES]
    newest_first = sorted(ended, key=lambda job: (job.updated, job.id), reverse=True)
    found = [Removal(job.id, job.name, "job", why) for job, why in _beyond(newest_first, rules.jobs, now)]
    gone = {each.job for each in found}
    left = [job for job in newest_first if job.id not in gone and have_snapshots(job.id)]
    return found + [Removal(job.id, job.name, "snapshots", why) for job, why in _beyond(left, rules.snapshots, now)]


def _beyond(newest_first: Sequence[JobHead], rule: RetentionRule, now: float) -> Iterable[tuple[JobHead, str]]:
    """The jobs beyond the limits of ``rule``, and why."""
    for index, job in enumerate(newest_first):
        age = (now - job.updated) / DAY
        if rule.days is not None and age > rule.days:
            yield job, f"ended {age:.1f} days ago, days = {rule.days:g}"
        elif rule.count is not None and index >= rule.count:
            yield job, f"{index} newer ones, count = {rule.count}"


def with_snapshots(folder: Path) -> Callable[[str], bool]:
    """A function that says whether a job of the service in ``folder`` has snapshots. It blocks."""
    return lambda job: (folder / "jobs" / job / SNAPSHOTS).is_dir()


class Retainer:
    """An async context manager of the service's loop, inside which the rules are applied again and again."""

    def __init__(self, settings: ServiceSettings, manager: Manager, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._folder = settings.folder
        self._manager = manager
        self._clock = clock
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Retainer:
        self._task = asyncio.create_task(self._go_on(), name="asyncpipe retention")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._closing.set()
        await asyncio.wait([self._task])

    async def _go_on(self) -> None:
        pause = min(
            self._settings.retention.every_seconds, FIRST_SECONDS
        )  # Whoever starts a service has more urgent things to do.
        while not await set_within(self._closing, pause):
            try:
                await self.apply()
            except (AsyncpipeError, OSError) as error:
                _logger.error("the rules of retention could not be applied: %s", error)
            except Exception:
                _logger.exception("the rules of retention could not be applied; this is a bug in asyncpipe")
            pause = self._settings.retention.every_seconds

    async def apply(self) -> Sequence[Removal]:
        """Remove what is not kept; what was removed."""
        jobs = await self._manager.jobs.store.every()
        there, now = with_snapshots(self._folder), self._clock()
        removed = []
        for removal in await in_thread(lambda: removals(jobs, self._settings.retention, now, there)):
            if self._closing.is_set():
                break
            if await self._remove(removal):
                removed.append(removal)
        return removed

    async def _remove(self, removal: Removal) -> bool:
        """Whether it was removed; not where the job has been retried or deleted meanwhile."""
        manager, job = self._manager, removal.job
        try:
            if removal.what == "job":
                await manager.ended.delete(job)
            else:
                async with manager.jobs.turn(job):
                    if (await manager.jobs.store.get(job)).state not in FINAL_STATES:
                        return False
                    await in_thread(lambda: _remove_snapshots(self._folder / "jobs" / job))
        except (UnknownJobError, JobStateError):
            return False
        _logger.info("retention: %s of job %s (%s): %s", removal.what, job, removal.name, removal.reason)
        return True


def _remove_snapshots(folder: Path) -> None:
    aside = folder / f"{SNAPSHOTS}.incomplete"  # Snapshots that are removed in part never look complete.
    shutil.rmtree(aside, ignore_errors=True)
    if (folder / SNAPSHOTS).is_dir():
        (folder / SNAPSHOTS).rename(aside)
        shutil.rmtree(aside)
