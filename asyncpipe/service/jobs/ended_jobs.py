"""What clients ask of jobs that have ended: to go on, to be copied, to be deleted.

::

    retry    failed, cancelled, quarantined ──▶ queued      goes on from its newest snapshot, or an older one
    fork     any job ──▶ a new one, queued                  goes on from a copy of the other's snapshot
    delete   finished, failed, cancelled, quarantined ──▶   nothing of it is left

If the snapshots of a job are gone, a retry or a fork starts from scratch only with ``from_step=0``.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncpipe.service.job_states import FINAL_STATES, JobRecord, JobStateError
from asyncpipe.service.jobs.active_jobs import ActiveJobs
from asyncpipe.service.jobs.job_folder import (
    DELETED,
    FORKING,
    FilesOfJob,
    check_step,
    copy_job,
    files_of,
    folder_errors,
)
from asyncpipe.service.store.job_store import make_id
from asyncpipe.train.blocking_calls import in_thread

__all__ = ["EndedJobs"]


class EndedJobs:
    """The jobs of a service that have ended. Belongs to the service's loop; raises as ``ActiveJobs``."""

    def __init__(self, active: ActiveJobs, folder: Path) -> None:
        """``folder`` has a folder for each job."""
        self._active = active
        self._folder = folder

    async def retry(
        self, job: str, cause: str, from_step: int | None = None, document: Mapping[str, Any] | None = None
    ) -> JobRecord:
        """The job, queued again, to go on from the snapshot of ``from_step`` (default: the newest; 0: anew).

        ``document`` replaces its own. Raises ``JobStateError`` for one that has not ended or has finished,
        ``OptionError`` where there is no such snapshot, ``QueueFullError``.
        """
        store = self._active.store
        async with self._active.turn(job):
            before = await store.get(job)
            step = await self._check_step(before, from_step)
            after = await store.retry(job, cause, from_step, document, step=step)
            self._active.follow(before.state, after)
            return after

    async def fork(self, job: str, document: Mapping[str, Any], from_step: int | None = None, **more: Any) -> JobRecord:
        """A new job with ``document``, queued, which goes on from a copy of a snapshot of ``job``, in whatever state.

        ``from_step`` as for ``retry``, ``more`` as for ``JobStore.add``. Raises ``OptionError`` where there is no such
        snapshot, ``QueueFullError``.
        """
        store = self._active.store
        origin = await store.get(job)
        await self._check_step(origin, from_step)
        new = make_id(time.time())
        copy = self._folder / f"{new}{FORKING}"

        def make() -> int:
            with folder_errors(job, "copied"):
                return copy_job(self._folder / job, copy, from_step, str(document["name"]))

        try:
            step = await in_thread(make)
            record = await store.fork(new, document, job, step, **more)
        except BaseException:
            await in_thread(lambda: shutil.rmtree(copy, ignore_errors=True))
            raise
        try:
            await in_thread(lambda: copy.rename(self._folder / new))
        finally:  # Without its folder it is quarantined when its turn comes.
            self._active.follow(None, record)
        return record

    async def _check_step(self, record: JobRecord, step: int | None) -> int:
        """The step after which ``record``'s job goes on."""
        folder = self._folder / record.id
        return await in_thread(lambda: check_step(record.id, folder, step, record.snapshot))

    async def files(self, job: str) -> FilesOfJob:
        """What ``delete`` would delete. Raises ``JobStateError`` where that would be refused."""
        record = await self._active.store.get(job)
        self._check_ended(record)
        return await in_thread(lambda: files_of(self._folder / job))

    async def delete(self, job: str) -> tuple[JobRecord, FilesOfJob]:
        """Delete the job with its history, losses, logs and snapshots; what it was, and what it had.

        Raises ``JobStateError`` for a job that has not ended.
        """
        store, folder, aside = self._active.store, self._folder / job, self._folder / f"{job}{DELETED}"

        def rename(path: Path, to: Path) -> None:
            with folder_errors(job, "deleted"):
                if path.exists():
                    path.rename(to)

        async with self._active.turn(job):
            self._check_ended(await store.get(job))
            found = await in_thread(lambda: files_of(folder))
            await in_thread(lambda: rename(folder, aside))
            try:
                record = await store.delete(job)
            except BaseException:
                await in_thread(lambda: rename(aside, folder))
                raise
            self._active.forget(record)
        await in_thread(lambda: shutil.rmtree(aside, ignore_errors=True))
        return record, found

    def _check_ended(self, record: JobRecord) -> None:
        if record.state not in FINAL_STATES:
            raise JobStateError(record.id, record.state, "be deleted before it has ended")
