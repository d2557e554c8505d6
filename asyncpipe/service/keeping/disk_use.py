"""How many bytes the jobs of a service have on disk, by kind. Blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from asyncpipe.service.job_states import FINAL_STATES
from asyncpipe.service.jobs.job_folder import SNAPSHOTS, walk
from asyncpipe.service.jobs.loss_file import NAME as LOSSES
from asyncpipe.service.keeping.retention import EndedJob, KeptBytes
from asyncpipe.service.store.keeping_queries import StoredJob

__all__ = ["DiskUse", "is_leftover"]

INCOMPLETE = ".incomplete"


class DiskUse:
    """Measures the folder of a service, and remembers what jobs that have ended had. For one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ended: dict[str, tuple[float, KeptBytes]] = {}
        """By job, when it ended and what it had then."""

    def ended(self, known: Iterable[StoredJob], go_on: Callable[[], bool] = lambda: True) -> list[EndedJob]:
        """The jobs among ``known`` that have ended, and what each has; stops early unless ``go_on``."""
        found, remembered = [], {}
        for job in known:
            if job.state in FINAL_STATES and go_on():
                before = self._ended.get(job.id)
                again = before is not None and before[0] == job.updated
                kept = before[1] if before is not None and again else _measured(self._folder / "jobs" / job.id)
                remembered[job.id] = (job.updated, kept)
                found.append(EndedJob(job.id, job.name, job.updated, kept))
        self._ended = remembered
        return found

    def forget(self, job: str) -> None:
        """Measure ``job`` anew the next time."""
        self._ended.pop(job, None)

    def total(self) -> int:
        """The bytes of the folder, of jobs that have not ended as well."""
        total = sum(sum(kept) for _, kept in self._ended.values())
        for name in os.listdir(self._folder):
            if name != "jobs":
                total += sum(size for _, size in walk(self._folder / name))
                with suppress(FileNotFoundError):  # The store's own files come and go.
                    total += (self._folder / name).stat().st_size if (self._folder / name).is_file() else 0
        jobs = self._folder / "jobs"
        names = os.listdir(jobs) if jobs.is_dir() else []
        return total + sum(size for name in names if name not in self._ended for _, size in walk(jobs / name))


def is_leftover(name: str) -> bool:
    """Whether a file or folder of this name was being written by a process that was killed, if its job has ended."""
    return name.endswith(INCOMPLETE)


def _measured(folder: Path) -> KeptBytes:
    snapshots = losses = logs = leftovers = 0
    for path, size in walk(folder):
        parts = os.path.relpath(path, folder).split(os.sep)
        if any(map(is_leftover, parts)):
            leftovers += max(size, 1)
        elif parts[0] == SNAPSHOTS:
            snapshots += size
        elif parts[0] == LOSSES:
            losses += size
        else:
            logs += size
    return KeptBytes(snapshots, losses, logs, leftovers)
