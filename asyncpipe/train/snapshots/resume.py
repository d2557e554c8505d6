"""How a run continues: the newest intact snapshot in its folder, with all states restored.

::

    step-30/  damaged: reported ───────────▶ step-30.unusable/   makes room for the step-30 that will be written
    step-20/  intact, of this job ─▶ read ─▶ model, optimizer, states of the workload, and the run's own state last
    step-10/  read only if step-20 is damaged

A folder belongs to one process at a time: a second one would remove what the first is writing as incomplete.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from asyncpipe.errors import OptionError, WorkerLostError
from asyncpipe.train.batches import DataError
from asyncpipe.train.job_file import AUTO, Job, PipelineTable, SnapshotTable, job_file_error
from asyncpipe.train.snapshots.format import (
    INCOMPLETE_NAME,
    SNAPSHOT_NAME,
    STATE_NAME,
    FolderError,
    Manifest,
    Snapshot,
    needs_intervention,
    read_manifest,
    read_snapshot,
)
from asyncpipe.train.snapshots.stages_in_workers import StagesInWorkers
from asyncpipe.train.workload import Resumable

__all__ = [
    "ResumePoint",
    "is_kept_forever",
    "named_states",
    "newest_snapshot",
    "open_folder",
    "snapshots_in",
    "with_chosen_schedule",
]

_logger = logging.getLogger(__name__)

OWN_STATES = ("model", "optimizer", "run")
"""The states that every run has."""


@dataclass(frozen=True, slots=True, eq=False)
class ResumePoint(Snapshot):
    """The snapshot that a run continues from. Its states can be restored once."""

    changed: tuple[str, ...]
    """What the job says otherwise than the run that wrote the snapshot: ``training.steps: 9, was 6``."""
    removable: tuple[Path, ...]
    """This snapshot and older ones that are not kept forever, oldest first."""

    def __str__(self) -> str:
        changed = f" ({'; '.join(self.changed)})" if self.changed else ""
        return f"going on after step {self.step}, from {self.path}{changed}"

    def has_pipeline_of(self, job: Job) -> bool:
        """Whether the run that wrote the snapshot had the same ``[pipeline]``."""
        return bool(self.manifest.parameters.get("pipeline") == job.pipeline.model_dump(mode="json"))

    def restore(self, states: Mapping[str, Resumable], job: Job, stages: StagesInWorkers | None = None) -> None:
        """Restore all ``states``, in their order, and before them those that workers read. Blocks.

        Raises ``JobFileError`` if a state does not fit the job, and ``DataError`` if the job's data fails meanwhile.
        """
        if missing := sorted(states.keys() - self.states.keys()):
            raise job_file_error(job.path, f"snapshots.resume: {self.path} has no state of {', '.join(missing)}")
        if stages is not None:
            with self._fitting("what the stages need", job):
                stages.read(self)
        saved = dict(self.states)
        self.states.clear()
        for name, state in states.items():
            with self._fitting(f"{name}.pt", job):
                state.load_state_dict(saved.pop(name))  # Popped, so that its memory is released as soon as possible.

    @contextmanager
    def _fitting(self, what: str, job: Job) -> Iterator[None]:
        """Say of an error in the block that ``what`` does not fit the job."""
        try:
            yield
        except (DataError, WorkerLostError):
            raise
        except Exception as error:
            reason = " ".join(str(error).split())  # torch's message has a line for each key.
            problem = f"{what} of {self.path} does not fit this job: {type(error).__name__}: {reason}"
            raise job_file_error(job.path, f"snapshots.resume: {problem}") from error


def open_folder(job: Job, *, mapped: bool = False) -> ResumePoint | None:
    """Create the folder for the job's snapshots, if it wants some, and find the snapshot that the run continues from.

    ``mapped`` as in ``read_snapshot``.

    Removes incomplete snapshots of a killed process. If the run resumes, damaged snapshots that are newer than the
    returned one become ``step-N.unusable``. Raises ``JobFileError`` if the folder cannot be used, holds snapshots of
    another job or, for a run that does not resume, any snapshots, or if none of them is usable. Raises ``FolderError``
    for a failure that may pass; no snapshot is renamed then. Blocks.
    """
    if job.snapshots is None:
        return None
    folder = job.snapshots.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        existing = snapshots_in(folder)
        if existing and not job.snapshots.resume:
            problem = f"{folder} holds snapshots of another run, up to {existing[-1].name}"
            hint = "move them away or name another one, or go on from them with --resume"
            raise job_file_error(job.path, f"snapshots.folder: {problem}; {hint}")
        snapshot = newest_snapshot(folder, OWN_STATES, mapped=mapped)
        resumed = None if snapshot is None else _resume_point(snapshot, job, job.snapshots, existing)
        for path in folder.iterdir():
            if INCOMPLETE_NAME.fullmatch(path.name):
                shutil.rmtree(path)
        if snapshot is not None:
            _set_aside(path for path in existing if _step_of(path) > snapshot.step)
    except OptionError as error:
        raise job_file_error(job.path, f"snapshots.folder: {error}") from error
    except FolderError as error:
        raise FolderError(f"{job.path}: snapshots.folder: {error}") from error
    except OSError as error:
        problem = f"snapshots.folder: cannot use {folder}: {error.strerror}"
        if needs_intervention(error):
            raise job_file_error(job.path, problem) from error
        raise FolderError(f"{job.path}: {problem}") from error
    return resumed


def snapshots_in(folder: Path) -> list[Path]:
    """The snapshots in ``folder``, oldest first, by their names alone; raises ``OSError``. Blocks."""
    return sorted((path for path in folder.iterdir() if SNAPSHOT_NAME.fullmatch(path.name)), key=_step_of)


def newest_snapshot(folder: Path, needed: Sequence[str] = (), *, mapped: bool = False) -> Snapshot | None:
    """The newest intact snapshot in ``folder`` that has all states ``needed``, or ``None`` if there are none at all.

    Unusable newer ones are logged. Raises ``OptionError`` if none is usable, ``FolderError`` if that may pass. Blocks.
    """
    problem, disk_failed = None, False
    for path in reversed(snapshots_in(folder)):
        try:
            snapshot = read_snapshot(path, needed, mapped=mapped)
            if snapshot.step == _step_of(path):
                return snapshot
            raise OptionError(f"{path}: is the snapshot of step {snapshot.step}")
        except OptionError as error:
            # Only the message is kept: the error refers to this frame, and so to all states that were read.
            reason = str(error)
            _logger.warning("a snapshot cannot be used, the one before it is tried: %s", reason)
            problem = problem or reason
            disk_failed |= isinstance(error.__cause__, OSError) and not needs_intervention(error.__cause__)
    if problem is not None:
        # A network disk that failed may work again soon, and there is no older snapshot to continue from.
        kind = FolderError if disk_failed else OptionError
        raise kind(f"none of the snapshots in {folder} can be used; the newest: {problem}")
    return None


def named_states(
    own: Mapping[str, Resumable], others: Mapping[str, Resumable], run: Resumable, job: Job
) -> dict[str, Resumable]:
    """All states of a run by name, in the order in which they are restored: the model first, the run itself last.

    Raises ``JobFileError`` if one of the ``others``, which the workload adds, has a name that is not allowed.
    """
    for name in others:
        if name in OWN_STATES or not STATE_NAME.fullmatch(name):
            problem = f"{name!r} must be letters, digits and underscores, and none of {', '.join(OWN_STATES)}"
            raise job_file_error(job.path, f"job.entry: the workload's states: {problem}")
    return {**own, **others, "run": run}


def is_kept_forever(number: int, table: SnapshotTable) -> bool:
    """Whether the snapshot of this ``number`` (from 1) is one that is never removed."""
    return table.keep_every is not None and number > 0 and number % table.keep_every == 0


def _resume_point(snapshot: Snapshot, job: Job, table: SnapshotTable, existing: Iterable[Path]) -> ResumePoint:
    manifest = snapshot.manifest
    if manifest.job != job.name:
        problem = f"{snapshot.path} is of the job {manifest.job!r}, not of {job.name!r}"
        raise OptionError(f"{problem}; name another folder, or give the job its name back")
    older = [path for path in existing if _step_of(path) <= snapshot.step]
    before = manifest.parameters
    now = with_chosen_schedule(job, manifest).model_dump(mode="json", include=set(before))
    return ResumePoint(
        snapshot.path,
        manifest,
        snapshot.states,
        changed=tuple(_changes(before, now)),
        removable=tuple(path for path in older if not _stays(path, table)),
    )


def with_chosen_schedule(job: Job, manifest: Manifest) -> Job:
    """The job with the pipeline that the snapshot's run had chosen by measurement for the same devices.

    Measuring again might choose another schedule, which rounds sums differently. A job that names its schedule is
    returned as it is.
    """
    if job.pipeline.schedule != AUTO:
        return job
    try:
        before = PipelineTable.model_validate(manifest.parameters.get("pipeline"))
    except ValidationError:
        return job
    same = all(getattr(before, key) == getattr(job.pipeline, key) for key in ("devices", "replicas", "microbatches"))
    own = ("workers", "transport", "shard_optimizer", "gradient_dtype")
    before = before.model_copy(update={key: getattr(job.pipeline, key) for key in own})
    return job.model_copy(update={"pipeline": before}) if same and before.schedule != AUTO else job


def _stays(path: Path, table: SnapshotTable) -> bool:
    """Whether an older snapshot is kept forever; one whose manifest is damaged is not."""
    try:
        return is_kept_forever(read_manifest(path).number, table)
    except OptionError:
        return False


def _set_aside(paths: Iterable[Path]) -> None:
    """Rename unusable snapshots, because the run will write new ones of the same steps."""
    for path in paths:
        aside = path.with_name(f"{path.name}.unusable")
        if aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """``training.steps: 9, was 6`` for each value of a table that has changed."""
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changes(old, new, f"{where}{key}.")
        elif old != new:
            yield f"{where}{key}: {new}, was {old}"


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
