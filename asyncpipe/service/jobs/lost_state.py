"""Reports missing state when a service starts. No job restarts from scratch because its state is missing.

::

    jobs.sqlite3   jobs/            what a service does that starts
    gone           folders of jobs  refuses: LostStateError
    older          newer ones       refuses: they are of jobs that were accepted and are not known
    there          gone, or empty   refuses: a disk that is not mounted, most likely
    there          one is gone      quarantines that job, if it has not ended
    older          as old as it     goes on, and says in its log and in /readyz how many jobs of the audit it has not

``lost_state = "quarantine"`` among the settings is for what is gone for good: nothing is refused then. The last row
but one is looked at once more before each run of a job.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from asyncpipe.errors import AsyncpipeError
from asyncpipe.service.job_states import FINAL_STATES, JobRecord, JobState
from asyncpipe.service.jobs.job_folder import job_folders, newest_step, set_aside_after, tidy_folders
from asyncpipe.service.store.finding import JobHead
from asyncpipe.service.store.job_store import JobStore, StoreError
from asyncpipe.train.blocking_calls import in_thread

__all__ = ["LostStateError", "check_before_opening", "check_state", "make_ready", "what_is_lost"]

SHOWN = 5
"""Ids that a message names."""

_logger = logging.getLogger(__name__)


class LostStateError(AsyncpipeError, RuntimeError):
    """One half of a service's state is there and the other is not; the message says what was found, and what to do."""


def check_before_opening(store: Path, jobs: Path) -> None:
    """Raise ``LostStateError`` if the file ``store`` is gone or empty and ``jobs`` has folders of jobs. Blocks.

    To be called before the store is opened, which makes an empty one.
    """
    size = store.stat().st_size if store.exists() else 0
    log = store.with_name(f"{store.name}-wal")
    if not store.exists() and log.exists() and log.stat().st_size:
        found = f"{store} is gone, and {log.name} is there, with what was committed last"
        raise LostStateError(f"{found}; restore a backup into a new folder (asyncpipe service restore)")
    if not size and (folders := job_folders(jobs)):
        found = f"{store} is {'empty' if store.exists() else 'gone'}, and {jobs} has {_count(folders)}"
        advice = "restore a backup into a new folder (asyncpipe service restore), or move what is left away"
        raise LostStateError(f"{found}; {advice}")


async def check_state(store: JobStore, jobs: Path, *, refuse: bool) -> str:
    """Compare all jobs of ``store`` with the folders in ``jobs`` and with the audit beside it, before any of them runs.

    Ends what a kill has left half done. Quarantines jobs that have not ended and whose snapshots are gone. Raises
    ``LostStateError`` where it is more than single jobs, unless ``refuse`` is false: that is logged then. Returns what
    an operator must know of jobs that are lost; empty if none are.
    """
    known = await store.every()
    lost = await in_thread(lambda: _compare(known, jobs, refuse=refuse))
    for job, found in lost:
        _logger.error("job %s is quarantined: %s", job.id, found)
        with suppress(StoreError):  # On a full disk: it is looked at again before it runs.
            await store.transition(job.id, JobState.QUARANTINED, found, expect=job.state)
    audited, ever = await in_thread(lambda: len(set(_submitted(jobs.parent)))), await store.ever()
    if audited <= ever:
        return ""
    problem = f"the audit has {audited} submitted jobs, and the store only {ever}: what it committed last is lost"
    _logger.error("%s; restore a backup, or move audit.jsonl away if that is known", problem)
    return problem


def _submitted(folder: Path) -> Iterator[str]:
    """The ids of the jobs that were submitted, as the audit in ``folder`` has them. Blocks."""
    for path in (folder / "audit.jsonl.1", folder / "audit.jsonl"):
        with suppress(OSError), path.open("rb") as file:
            for line in file:
                with suppress(ValueError, KeyError):  # A kill may have torn it.
                    if b"201" in line and (table := json.loads(line))["status"] == 201:
                        yield table["job"]


def _compare(known: Sequence[JobHead], jobs: Path, *, refuse: bool) -> list[tuple[JobHead, str]]:
    """The jobs to quarantine, and why. Blocks."""
    ids = {job.id for job in known}
    tidy_folders(jobs, ids)
    folders = job_folders(jobs)
    saved = [job for job in known if job.snapshot is not None]
    problem = ""
    if unknown := sorted(folders - ids):
        problem = f"{jobs} has {_count(unknown)} that the store does not know, so the store is older than they are"
        problem += "; restore a backup into a new folder (asyncpipe service restore), or move these folders away"
    elif saved and not folders:
        problem = (
            f"the store has {len(saved)} jobs with snapshots, and {jobs} is {'empty' if jobs.exists() else 'gone'}"
        )
        problem += "; mount its disk, or restore a backup into a new folder (asyncpipe service restore)"
    if problem and refuse:
        raise LostStateError(f'{problem}. If it is gone for good, start with lost_state = "quarantine"')
    if problem:
        _logger.error("%s", problem)
    if gone := [job.id for job in saved if job.state in FINAL_STATES and job.id not in folders]:
        _logger.error("the losses, logs and snapshots of %d jobs that have ended are gone: %s", len(gone), _names(gone))
    waiting = [job for job in saved if job.state not in FINAL_STATES]
    return [(job, found) for job in waiting if (found := what_is_lost(jobs / job.id, job.snapshot)) is not None]


def make_ready(folder: Path, record: JobRecord) -> tuple[str | None, str]:
    """Why the job in ``folder`` cannot go on, and what it has lost that it can do without. Blocks.

    To be called before each run: snapshots that it is not to go on from are set aside. Raises ``OSError``.
    """
    if record.from_step is not None:
        set_aside_after(folder, record.from_step)
    lost, newest, last = what_is_lost(folder, record.snapshot), newest_step(folder), record.snapshot or ""
    if lost is None and last.startswith("step-") and newest < int(last[5:]):
        return None, f"; its snapshot {last} is gone, so it goes on from step-{newest}"
    return lost, ""


def what_is_lost(folder: Path, snapshot: str | None) -> str | None:
    """Why the job in ``folder``, whose last was ``snapshot``, cannot go on; ``None`` if it can. Blocks."""
    if snapshot is None or newest_step(folder):
        return None
    where = folder if not folder.is_dir() else folder / "snapshots"
    what = "has none" if where.is_dir() else "is gone"
    return f"its snapshots are lost: the last was {snapshot}, and {where} {what}; it is not begun anew by itself"


def _count(folders: Sequence[str] | set[str]) -> str:
    number = len(folders)
    what = "the folder of a job" if number == 1 else f"the folders of {number} jobs"
    return f"{what} ({_names(folders)})"


def _names(jobs: Sequence[str] | set[str]) -> str:
    names = sorted(jobs)
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
