"""The files of a job, when it begins, is copied or deleted. All of it blocks; steps are those of snapshots.

::

    jobs/ID/               snapshots/, last_step.json.gz, trace.json …
    jobs/ID.deleted/       of a job that is being deleted
    jobs/ID.forking/       of a copy that the store does not know yet

Each change is made in an order in which a kill at any instant loses nothing: ``tidy_folders`` ends it at the next
start.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from asyncpipe.errors import AsyncpipeError, OptionError
from asyncpipe.train.snapshots.format import manifest_checksum
from asyncpipe.train.snapshots.resume import snapshots_in

__all__ = [
    "DELETED",
    "FORKING",
    "JOB_ID",
    "FilesOfJob",
    "JobFolderError",
    "check_step",
    "copy_job",
    "files_of",
    "folder_errors",
    "job_folders",
    "newest_step",
    "set_aside_after",
    "snapshot_steps",
    "tidy_folders",
]

JOB_ID = re.compile(r"[0-9a-hjkmnp-tv-z]{26}")
"""The ids of jobs, which name their folders."""
SNAPSHOTS = "snapshots"
DELETED, FORKING = ".deleted", ".forking"
TRIES = 5
"""How often a snapshot is copied that the job removes meanwhile."""


class JobFolderError(AsyncpipeError, RuntimeError):
    """The folder of a job cannot be copied or deleted, as on a full disk; nothing was changed."""


@contextmanager
def folder_errors(job: str, what: str) -> Iterator[None]:
    """Raise ``JobFolderError`` for an ``OSError`` in the block: the folder of ``job`` could not be ``what``."""
    try:
        yield
    except OSError as error:
        raise JobFolderError(f"the folder of job {job} could not be {what}: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class FilesOfJob:
    """What a job has on disk."""

    files: int
    bytes: int
    snapshots: tuple[int, ...]
    """Their steps."""


def files_of(folder: Path) -> FilesOfJob:
    """What the job in ``folder`` has on disk; nothing if it is not there. What vanishes meanwhile is left out."""
    sizes = []
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                sizes.append(os.lstat(os.path.join(where, name)).st_size)
    return FilesOfJob(len(sizes), sum(sizes), tuple(snapshot_steps(folder)))


def job_folders(jobs: Path) -> set[str]:
    """The ids of the jobs that have folders in ``jobs``; none if that is not there."""
    with suppress(FileNotFoundError):
        return {name for name in os.listdir(jobs) if JOB_ID.fullmatch(name)}
    return set()


def snapshot_steps(folder: Path) -> list[int]:
    """The steps of the snapshots of the job in ``folder``, in their order."""
    with suppress(FileNotFoundError):
        return [int(path.name.removeprefix("step-")) for path in snapshots_in(folder / SNAPSHOTS)]
    return []


def newest_step(folder: Path) -> int:
    """The step of the newest snapshot of the job in ``folder``; 0 without any."""
    return max(snapshot_steps(folder), default=0)


def set_aside_after(folder: Path, step: int) -> None:
    """Rename snapshots that are newer than ``step``, so that the job goes on from that one. May be called again."""
    for newer in reversed([each for each in snapshot_steps(folder) if each > step]):
        path = folder / SNAPSHOTS / f"step-{newer}"
        aside = path.with_name(f"{path.name}.replaced")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)


def check_step(job: str, folder: Path, step: int | None, recorded: str | None) -> int:
    """The step from which the job in ``folder`` can go on: ``step``, or the newest; 0 for its beginning.

    ``recorded`` is the last snapshot that the store was told of. Raises ``OptionError``: a job whose snapshots are gone
    starts from scratch only with step 0.
    """
    steps = snapshot_steps(folder)
    there = f"it has those of {', '.join(map(str, steps))}" if steps else "it has none"
    if step is not None and step != 0 and step not in steps:
        raise OptionError(f"from_step: job {job} has no snapshot of step {step}; {there}")
    if step is None and not steps and recorded is not None:
        gone = f"the snapshots of job {job} are gone (the last was {recorded})"
        raise OptionError(f"from_step: {gone}; give 0 to begin anew, or bring them back")
    return step if step is not None else max(steps, default=0)


# Copies


def copy_job(folder: Path, to: Path, step: int | None, name: str) -> int:
    """Make ``to`` the folder of a copy of the job in ``folder``; the step that it goes on from.

    It has the snapshot of ``step``, or the newest, as one of a job called ``name``. Files of the snapshot are links
    where the disk has them, since they never change. Raises ``OSError``.
    """
    for left in reversed(range(TRIES)):
        found = newest_step(folder) if step is None else step
        try:
            shutil.rmtree(to, ignore_errors=True)
            to.mkdir(mode=0o700)
            if found:
                _copy_snapshot(folder / SNAPSHOTS / f"step-{found}", to / SNAPSHOTS / f"step-{found}", name)
        except FileNotFoundError:  # A job that runs has removed it.
            if not left or step is not None:
                raise
        else:
            break
    return found


def _copy_snapshot(snapshot: Path, to: Path, name: str) -> None:
    to.mkdir(parents=True)
    for path in sorted(snapshot.iterdir()):
        if path.suffix == ".json":
            about = json.loads(path.read_text(encoding="utf-8"))
            about.pop("checksum", None)
            about["job"] = name
            with (to / path.name).open("x", encoding="utf-8") as file:
                json.dump({**about, "checksum": manifest_checksum(about)}, file, indent=2)
        else:
            try:
                os.link(path, to / path.name)
            except FileNotFoundError:
                raise
            except OSError:  # Not on this disk.
                shutil.copyfile(path, to / path.name)


# After a kill


def tidy_folders(jobs: Path, known: Collection[str]) -> None:
    """End what was begun with folders in ``jobs`` when the last process was killed; ``known`` are the store's jobs."""
    if not jobs.is_dir():
        return
    for path in [jobs / name for name in os.listdir(jobs) if name.endswith((DELETED, FORKING))]:
        job = path.name.removesuffix(DELETED).removesuffix(FORKING)
        if job in known and not (jobs / job).exists():
            path.rename(jobs / job)  # The store knows it: it was not deleted, or it was copied.
        else:
            shutil.rmtree(path, ignore_errors=True)
