"""Applies the rules of retention while a service runs, every ``every_seconds``.

::

    jobs that have ended ─▶ DiskUse, in a thread ─▶ removals ─▶ each under its job's turn: deleted, logged
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from asyncpipe.core.predict.memory import format_bytes
from asyncpipe.errors import AsyncpipeError
from asyncpipe.service.job_states import FINAL_STATES, JobStateError
from asyncpipe.service.jobs.job_folder import SNAPSHOTS
from asyncpipe.service.jobs.loss_file import NAME as LOSSES
from asyncpipe.service.jobs.manager import Manager
from asyncpipe.service.keeping.disk_use import DiskUse, is_leftover
from asyncpipe.service.keeping.retention import Kind, Removal, removals
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.store.job_store import UnknownJobError
from asyncpipe.service.store.keeping_queries import stored_jobs
from asyncpipe.train.blocking_calls import in_thread

__all__ = ["Retainer"]

FIRST_SECONDS = 5.0
"""Until the rules are applied for the first time."""

_logger = logging.getLogger(__name__)


class Retainer:
    """An async context manager of the service's loop, inside which the rules are applied again and again."""

    def __init__(self, settings: ServiceSettings, manager: Manager, clock: Callable[[], float] = time.time) -> None:
        self._rules = settings.retention
        self._folder = settings.folder
        self._manager = manager
        self._clock = clock
        self._use = DiskUse(settings.folder)
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
        pause = self._rules.every_seconds
        await self._wait(min(pause, FIRST_SECONDS))  # Whoever starts a service has more urgent things to do.
        while not self._closing.is_set():
            try:
                await self.apply()
            except (AsyncpipeError, OSError) as error:
                _logger.error("the rules of retention could not be applied: %s", error)
            except Exception:
                _logger.exception("the rules of retention could not be applied; this is a bug in asyncpipe")
            await self._wait(pause)

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    async def apply(self) -> Sequence[Removal]:
        """Remove what is not kept; what was removed."""
        store = self._manager.jobs.store
        known = await store.thread.run(stored_jobs, writes=False)
        ended = await in_thread(lambda: self._use.ended(known, lambda: not self._closing.is_set()))
        removed = []
        for removal in removals(ended, self._rules, self._clock()):
            if self._closing.is_set():
                break
            if await self._remove(removal):
                removed.append(removal)
        if removed:
            size = format_bytes(sum(removal.bytes for removal in removed))
            _logger.info("retention: %d removals of %s", len(removed), size)
        return removed

    async def _remove(self, removal: Removal) -> bool:
        """Whether it was removed; not where the job has been retried or deleted meanwhile."""
        manager, job = self._manager, removal.job
        try:
            if removal.kind is Kind.JOBS:
                await manager.ended.delete(job)
            else:
                async with manager.jobs.turn(job):
                    used = manager.logs.of(job) is not None and removal.kind is Kind.LOGS
                    if used or (await manager.jobs.store.get(job)).state not in FINAL_STATES:
                        return False
                    await in_thread(lambda: _remove_files(self._folder / "jobs" / job, removal.kind))
        except (UnknownJobError, JobStateError):
            return False
        self._use.forget(job)
        what = "" if removal.kind is Kind.JOBS else f"{removal.kind} of "
        size = format_bytes(removal.bytes)
        _logger.info("retention: %sjob %s (%s), %s: %s", what, job, removal.name, size, removal.reason)
        return True


def _remove_files(folder: Path, kind: Kind) -> None:
    """Remove what is of ``kind`` in the folder of a job. Blocks; raises ``OSError``."""
    if kind is Kind.LOSSES:
        (folder / LOSSES).unlink(missing_ok=True)
    elif kind is Kind.SNAPSHOTS and (folder / SNAPSHOTS).is_dir():
        aside = folder / f"{SNAPSHOTS}.incomplete"  # One that is removed in part never looks complete.
        shutil.rmtree(aside, ignore_errors=True)
        (folder / SNAPSHOTS).rename(aside)
        shutil.rmtree(aside)
    elif kind is Kind.LEFTOVERS:
        for where in (folder, folder / SNAPSHOTS):
            for path in list(where.iterdir()) if where.is_dir() else []:
                if is_leftover(path.name):
                    _delete(path)
    elif kind is Kind.LOGS and folder.is_dir():
        for path in list(folder.iterdir()):
            if path.name not in (SNAPSHOTS, LOSSES):
                _delete(path)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
