"""Where a run goes on: the newest snapshot in its folder that is whole, and all of its state put back.

::

    step-30/  damaged: told ──────────────▶ step-30.unusable/   out of the way of the step-30 to come
    step-20/  whole, of this job ─▶ read ─▶ model, optimizer, whatever joined in, and, last, the run itself
    step-10/  looked at only if step-20 is damaged

Files are read in one process at a time: a folder is one run's, and the second process that is started on it before
the first has ended would take what that one is writing for a left-over.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from asyncpipe.errors import OptionError
from asyncpipe.train.batches import DataError
from asyncpipe.train.job_file import AUTO, Job, PipelineTable, SnapshotTable, job_file_error
from asyncpipe.train.snapshots.format import (
    LEFT_OVER,
    STATE_NAME,
    WHOLE,
    FolderError,
    Snapshot,
    is_lasting,
    read_about,
    read_snapshot,
)
from asyncpipe.train.workload import Resumable

__all__ = ["ResumePoint", "is_for_good", "join", "newest_snapshot", "open_folder", "snapshots_in", "with_schedule_of"]

_logger = logging.getLogger(__name__)

OWN_STATES = ("model", "optimizer", "run")
"""Those that every run has."""


@dataclass(slots=True, eq=False)
class ResumePoint:
    """The snapshot that a run goes on from; its states can be put back once, and are gone then."""

    path: Path
    step: int
    number: int
    """Of the snapshot, from 1, over all processes of the run."""
    changed: tuple[str, ...]
    """What the job says otherwise than the run that wrote it: ``training.steps: 9, was 6``."""
    parameters: Mapping[str, Any]
    """The tables of the job that wrote it, as JSON has them."""
    schedule_sha256: str | None
    passing: tuple[Path, ...]
    """It and older ones that are not kept for good, the oldest first."""
    _states: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        changed = f" ({'; '.join(self.changed)})" if self.changed else ""
        return f"going on after step {self.step}, from {self.path}{changed}"

    def restore(self, states: Mapping[str, Resumable], job: Job) -> None:
        """Put all ``states`` back, in their order. Blocks.

        Raises ``JobFileError`` where one does not fit, ``DataError`` where the job's data fails on the way.
        """
        if missing := sorted(states.keys() - self._states.keys()):
            raise job_file_error(job.path, f"snapshots.resume: {self.path} has no state of {', '.join(missing)}")
        saved, self._states = self._states, {}
        for name, state in states.items():
            try:
                # Taken out: what is put back need not be held twice.
                state.load_state_dict(saved.pop(name))
            except DataError:
                raise
            except Exception as error:
                reason = " ".join(str(error).split())  # torch's has a line for each key.
                problem = f"{name}.pt of {self.path} does not fit this job: {type(error).__name__}: {reason}"
                raise job_file_error(job.path, f"snapshots.resume: {problem}") from error


def open_folder(job: Job) -> ResumePoint | None:
    """Make the folder for the job's snapshots, if it wants some, and remove what a killed process left unfinished.

    Returns the newest whole snapshot in it where the job is to go on and there is one; others that are newer then
    become ``step-N.unusable``. Raises ``JobFileError`` where the folder cannot be used, or holds snapshots of another
    run or none that can be used: a run adds to none but its own, and replaces none. Raises ``FolderError`` where it may
    go better another time: no snapshot is called unusable for that. Blocks.
    """
    if job.snapshots is None:
        return None
    folder = job.snapshots.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = snapshots_in(folder)
        if there and not job.snapshots.resume:
            problem = f"{folder} holds snapshots of another run, up to {there[-1].name}"
            hint = "move them away or name another one, or go on from them with --resume"
            raise job_file_error(job.path, f"snapshots.folder: {problem}; {hint}")
        snapshot = newest_snapshot(folder, OWN_STATES)
        resumed = None if snapshot is None else _resumed(snapshot, job, there)
        for path in folder.iterdir():
            if LEFT_OVER.fullmatch(path.name):
                shutil.rmtree(path)
        if snapshot is not None:
            _set_aside(path for path in there if _step_of(path) > _step_of(snapshot.path))
    except OptionError as error:
        raise job_file_error(job.path, f"snapshots.folder: {error}") from error
    except FolderError as error:
        raise FolderError(f"{job.path}: snapshots.folder: {error}") from error
    except OSError as error:
        problem = f"snapshots.folder: cannot use {folder}: {error.strerror}"
        if is_lasting(error):
            raise job_file_error(job.path, problem) from error
        raise FolderError(f"{job.path}: {problem}") from error
    return resumed


def snapshots_in(folder: Path) -> list[Path]:
    """Those in ``folder``, the oldest first, by their names alone; raises ``OSError``. Blocks."""
    return sorted((path for path in folder.iterdir() if WHOLE.fullmatch(path.name)), key=_step_of)


def newest_snapshot(folder: Path, needed: Iterable[str] = ()) -> Snapshot | None:
    """The newest snapshot in ``folder`` that is whole, all of it read; ``None`` where there is none at all.

    Each that cannot be used is a line in the log. Raises ``OptionError`` where none of them can, ``OSError`` where the
    folder cannot be read, and ``FolderError``, which is one, where a snapshot cannot be read now, or none can and the
    disk failed with one of them. Blocks; executes nothing of what it reads.
    """
    needed = tuple(needed)
    problem, disk_failed = None, False
    for path in reversed(snapshots_in(folder)):
        try:
            snapshot = read_snapshot(path, needed)
            if snapshot.step == _step_of(path):
                return snapshot
            raise OptionError(f"{path}: is the snapshot of step {snapshot.step}")
        except OptionError as error:
            # In words: the error would hold on to this frame, and with it to the snapshot that is found at last.
            reason = str(error)
            _logger.warning("a snapshot cannot be used, the one before it is tried: %s", reason)
            problem = problem or reason
            disk_failed |= isinstance(error.__cause__, OSError) and not is_lasting(error.__cause__)
    if problem is not None:
        # A disk that a network brings may be back soon; where there is nothing older to go on from, that is the hope.
        kind = FolderError if disk_failed else OptionError
        raise kind(f"none of the snapshots in {folder} can be used; the newest: {problem}")
    return None


def _resumed(snapshot: Snapshot, job: Job, there: Iterable[Path]) -> ResumePoint:
    about = snapshot.about
    if about.get("job") != job.name:
        problem = f"{snapshot.path} is of the job {about.get('job')!r}, not of {job.name!r}"
        raise OptionError(f"{problem}; name another folder, or give the job its name back")
    assert job.snapshots is not None
    older = [path for path in there if _step_of(path) <= snapshot.step]
    tables = about.get("parameters", {})
    return ResumePoint(
        path=snapshot.path,
        step=snapshot.step,
        number=about.get("number", 0),
        changed=tuple(_changed(tables, with_schedule_of(job, tables).model_dump(mode="json", include=set(tables)))),
        parameters=tables,
        schedule_sha256=about.get("schedule_sha256"),
        passing=tuple(path for path in older if not _stays(path, job.snapshots)),
        _states=snapshot.states,
    )


def is_for_good(number: int, table: SnapshotTable) -> bool:
    """Whether the snapshot of this ``number`` (from 1) is one that stays."""
    return table.keep_every is not None and number > 0 and number % table.keep_every == 0


def _stays(path: Path, table: SnapshotTable) -> bool:
    """Whether an older snapshot is for good; one that says nothing of itself is not."""
    try:
        return is_for_good(read_about(path).get("number", 0), table)
    except OptionError:
        return False


def _set_aside(paths: Iterable[Path]) -> None:
    """Give snapshots that cannot be used another name, as the run will write ones of their steps again."""
    for path in paths:
        aside = path.with_name(f"{path.name}.unusable")
        if aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """``training.steps: 9, was 6`` for each value of a table that is not as it was."""
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changed(old, new, f"{where}{key}.")
        elif old != new:
            yield f"{where}{key}: {new}, was {old}"


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


# What goes on


def join(own: Mapping[str, Resumable], others: Mapping[str, Resumable], run: Resumable, job: Job) -> dict[str, Any]:
    """All states of a run, in the order in which they are put back: the model first, the run itself last.

    Raises ``JobFileError`` where one of the ``others`` has a name that it cannot have.
    """
    for name in others:
        if name in OWN_STATES or not STATE_NAME.fullmatch(name):
            problem = f"{name!r} must be letters, digits and underscores, and none of {', '.join(OWN_STATES)}"
            raise job_file_error(job.path, f"job.entry: the workload's states: {problem}")
    return {**own, **others, "run": run}


def with_schedule_of(job: Job, parameters: Mapping[str, Any]) -> Job:
    """The job with the schedule that a snapshot's run had chosen, where it leaves that to be chosen for the same
    devices; ``parameters`` are the snapshot's.

    Measuring once more might choose something else, whose sums are rounded otherwise.
    """
    if job.pipeline.schedule != AUTO:
        return job
    try:
        table = PipelineTable.model_validate(parameters.get("pipeline"))
    except ValidationError:
        return job
    same = (table.devices, table.microbatches) == (job.pipeline.devices, job.pipeline.microbatches)
    return job.model_copy(update={"pipeline": table}) if same and table.schedule != AUTO else job
