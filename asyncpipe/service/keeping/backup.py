"""Makes a backup of a service's folder while the service runs, or when it does not.

The backup is made by a process of its own, which asks nothing of the service, so it also works for one that hangs. It
has a state that the service could have been killed in, and from which it would have gone on with the same bits::

    store      first, as one state of all jobs      so all that it has told of was on disk before
    snapshots  each is opened as a whole            those that the store names, or newer ones
    losses     behind the snapshots                 they have each step of the snapshots, or are read once more

A snapshot that the service removes meanwhile is read to its end, since its files are open. Jobs that were submitted
after the backup has begun are not in it.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from shutil import copyfileobj
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import IO

from asyncpipe import __version__
from asyncpipe.errors import OptionError
from asyncpipe.service.jobs.loss_file import LONGEST, LossRow
from asyncpipe.service.jobs.loss_file import NAME as LOSSES
from asyncpipe.service.keeping.archive import ArchiveWriter, BackupError
from asyncpipe.service.store.database import STORE, open_beside
from asyncpipe.train.snapshots.format import FolderError, read_manifest
from asyncpipe.train.snapshots.resume import snapshots_in
from asyncpipe.train.snapshots.sync_folder import sync_folder

__all__ = ["BackupSummary", "SnapshotsWanted", "back_up"]

TRIES = 10
"""How often a file that the service changes meanwhile is read."""
LOGS = ("audit.jsonl", "audit.jsonl.1", "refused.jsonl", "refused.jsonl.1")
SNAPSHOTS = "snapshots"


class SnapshotsWanted(StrEnum):
    """Which snapshots of each job become part of a backup."""

    ALL = "all"
    NEWEST = "newest"
    """Enough to go on from."""
    NONE = "none"
    """Jobs that have not ended are quarantined by a service that is restored from it, since it must not begin them
    anew by itself."""


@dataclass(slots=True)
class BackupSummary:
    """What became part of a backup."""

    path: Path
    jobs: int = 0
    snapshots: int = 0
    files: int = 0
    size: int = 0
    """Of the backup, in bytes."""
    problems: list[str] = field(default_factory=list)
    """What was damaged or missing before; the backup has all else."""


def back_up(
    folder: Path,
    to: Path,
    snapshots: SnapshotsWanted = SnapshotsWanted.ALL,
    progress: Callable[[str], object] = lambda job: None,
) -> BackupSummary:
    """Write a backup of the service in ``folder`` to the file ``to``, which must not be there. Blocks.

    The file appears when it is complete and on disk, with mode 0600: it has what clients submitted, and the hashes of
    tokens. ``progress`` is called with each job. Raises ``BackupError``, and ``StoreError`` where the store cannot be
    read; a file that was begun is removed then.
    """
    beside = to.with_name(f"{to.name}.incomplete")
    if to.exists() or beside.exists():
        there = to if to.exists() else beside
        advice = "name another file" if to.exists() else "another backup writes it, or was killed: remove it"
        raise BackupError(f"{there} is there already; {advice}")
    try:
        with ExitStack() as stack:
            file = stack.enter_context(open(beside, "xb", opener=_private))
            stack.callback(beside.unlink, missing_ok=True)
            summary = _Backup(folder, to, snapshots, ArchiveWriter(file), progress).run()
            file.flush()
            os.fsync(file.fileno())
            summary.size = file.tell()
            beside.rename(to)
        sync_folder(to.parent)
    except OSError as error:
        where = error.filename or to
        raise BackupError(f"no backup was made: {where}: {error.strerror or error}") from error
    return summary


class _Backup:
    def __init__(
        self, folder: Path, to: Path, wanted: SnapshotsWanted, archive: ArchiveWriter, progress: Callable[[str], object]
    ) -> None:
        self._folder = folder
        self._scratch = to.parent
        self._wanted = wanted
        self._archive = archive
        self._progress = progress
        self._summary = BackupSummary(to)

    def run(self) -> BackupSummary:
        with NamedTemporaryFile(dir=self._scratch, prefix=".asyncpipe-", suffix=f".{STORE}") as copy:
            jobs = _copied_store(self._folder / STORE, Path(copy.name))
            with Path(copy.name).open("rb") as file:
                self._add(STORE, file)
        for job, attempts in jobs:
            self._progress(job)
            self._add_job(job, was_started=attempts > 0)
        self._summary.jobs = len(jobs)
        for name in LOGS:
            if (self._folder / name).is_file():
                self._add_lines(self._folder / name, name)
        about = {"asyncpipe": __version__, "jobs": len(jobs), "snapshots": str(self._wanted)}
        with TemporaryFile(dir=self._scratch) as scratch:
            self._archive.finish(about, scratch)
        return self._summary

    def _add_job(self, job: str, *, was_started: bool) -> None:
        folder = self._folder / "jobs" / job
        if not folder.is_dir():
            if was_started:
                self._summary.problems.append(f"job {job} was started, and {folder} is not there")
            return
        step = self._add_snapshots(folder / SNAPSHOTS) if self._wanted is not SnapshotsWanted.NONE else 0
        self._add_folder(folder, step)

    def _add_folder(self, folder: Path, step: int) -> None:
        """Add the files of a job, but for its snapshots, of which the newest is of ``step``."""
        for path in sorted(folder.iterdir()):
            if path.name.endswith(".incomplete") or path.name == SNAPSHOTS:
                continue
            name = path.relative_to(self._folder).as_posix()
            try:
                if path.is_dir():
                    self._add_folder(path, 0)
                elif path.name.endswith(".jsonl"):
                    self._add_lines(path, name, step if path.name == LOSSES else 0)
                elif path.is_file():
                    with path.open("rb") as file:
                        self._add(name, file)
            except FileNotFoundError:
                continue  # The service has removed it meanwhile.

    def _add(self, name: str, file: IO[bytes]) -> str:
        self._summary.files += 1
        return self._archive.add(name, file, os.fstat(file.fileno()).st_size)

    # Lines

    def _add_lines(self, path: Path, name: str, step: int = 0) -> None:
        """Add whole lines of a file that the service may be writing to; of losses, at least those up to ``step``."""
        for attempt in range(1, TRIES + 1):
            with path.open("rb") as file, TemporaryFile(dir=self._scratch) as copy:
                copyfileobj(file, copy)
                last = _cut_to_lines(copy)
                if last < step and attempt < TRIES:
                    continue  # A run that resumes has cut it off, and writes it anew.
                if last < step:
                    self._summary.problems.append(f"{path} ends with step {last}, before the snapshot of step {step}")
                copy.seek(0)
                self._add(name, copy)
                return

    # Snapshots

    def _add_snapshots(self, folder: Path) -> int:
        """Add what is wanted of the snapshots in ``folder``; the step of the newest one that was added, or 0."""
        newest, tried = 0, set[str]()
        while True:
            # Newest first; all of them may be gone before they are opened, and then newer ones are there.
            there = [path for path in snapshots_in(folder) if path.name not in tried] if folder.is_dir() else []
            for path in reversed(there):
                if newest and self._wanted is SnapshotsWanted.NEWEST:
                    break
                newest = max(newest, self._add_snapshot(path))
                tried.add(path.name)
            if newest or not there:
                break
        return newest

    def _add_snapshot(self, path: Path) -> int:
        """Add one; its step, or 0 if it was removed meanwhile or is damaged."""
        try:
            manifest = read_manifest(path)
            with ExitStack() as stack:
                names = ["snapshot.json", *manifest.sha256]
                files = {name: stack.enter_context((path / name).open("rb")) for name in names}
                for name, file in files.items():
                    where = (path / name).relative_to(self._folder).as_posix()
                    if self._add(where, file) != manifest.sha256.get(name) and name in manifest.sha256:
                        self._summary.problems.append(f"{path}: {name} is damaged")
        except (OptionError, FolderError, FileNotFoundError) as error:
            if path.exists():
                self._summary.problems.append(f"not in the backup: {error}")
            return 0
        self._summary.snapshots += 1
        return manifest.step


def _copied_store(path: Path, copy: Path) -> list[tuple[str, int]]:
    """The ids of all jobs and how often each was started, in the copy of the store that this makes."""
    with open_beside(path) as source, closing(sqlite3.connect(copy, isolation_level=None)) as target:
        # All pages at once: one state, for which no commit of the service has to wait, since it has a write-ahead log.
        source.backup(target)
        target.execute("PRAGMA journal_mode = DELETE")
        return target.execute("SELECT id, attempts FROM jobs ORDER BY number").fetchall()


def _cut_to_lines(file: IO[bytes]) -> int:
    """Cut ``file`` behind its last whole line; the step of that line, if it is one of losses, else 0."""
    end = file.seek(0, os.SEEK_END)
    begin = max(0, end - 64 * LONGEST)
    file.seek(begin)
    whole = file.read().rpartition(b"\n")[0]
    file.truncate(begin + len(whole) + 1 if whole else begin)
    line = whole.rpartition(b"\n")[2]
    row = LossRow.parse(line) if line else None
    return 0 if row is None else row.step


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, stat.S_IRUSR | stat.S_IWUSR)
