"""Makes a backup of a service's folder while the service runs or when it does not, and a folder from a backup.

A backup is a tar archive. It is made by a process of its own, which asks nothing of the service, so it also works for
one that hangs. It has a state that the service could have been killed in, and from which it would have gone on with the
same bits::

    1. the store is copied, as one state of all jobs     so all that it has told of was on disk before
    2. each snapshot is added as a whole                 those that the store names, or newer ones
    3. the copy gets the losses until the snapshots      since newer snapshots have newer losses
    4. the copy of the store is added last               an archive without it is cut off

A snapshot that the service removes meanwhile is read to its end, since its files are open. Jobs that were submitted
after the backup has begun are not in it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import stat
import tarfile
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory

from asyncpipe.errors import AsyncpipeError, OptionError
from asyncpipe.service.jobs.job_folder import SNAPSHOTS
from asyncpipe.service.store.database import STORE, StoreError, check_store, open_beside
from asyncpipe.service.token_roles import TOKENS
from asyncpipe.train.snapshots.format import FolderError, read_manifest
from asyncpipe.train.snapshots.resume import snapshots_in
from asyncpipe.whole_folder import sync_folder

__all__ = ["BackupError", "BackupSummary", "SnapshotsWanted", "back_up", "restore"]

LOGS = ("audit.jsonl", "audit.jsonl.1", "refused.jsonl", "refused.jsonl.1")


class BackupError(AsyncpipeError, RuntimeError):
    """A backup cannot be made or restored; the message says what is wrong and what would be right.

    Nothing is left of what was begun.
    """


class SnapshotsWanted(StrEnum):
    """Which snapshots of each job become part of a backup."""

    ALL = "all"
    NEWEST = "newest"
    """Enough to go on from."""
    NONE = "none"
    """A service that is restored from it quarantines jobs that had snapshots and have not ended."""


@dataclass(slots=True)
class BackupSummary:
    """What became part of a backup."""

    path: Path
    jobs: int = 0
    snapshots: int = 0
    size: int = 0
    """Of the backup, in bytes."""
    problems: list[str] = field(default_factory=list)
    """What was damaged or missing before; the backup has all else."""


def back_up(folder: Path, to: Path, snapshots: SnapshotsWanted = SnapshotsWanted.ALL) -> BackupSummary:
    """Write a backup of the service in ``folder`` to the file ``to``, which must not be there. Blocks.

    The file appears when it is complete and on disk, with mode 0600: it has what clients submitted, and the hashes of
    tokens. Raises ``BackupError``, and ``StoreError`` where the store cannot be read; a file that was begun is removed
    then.
    """
    beside = to.with_name(f"{to.name}.incomplete")
    if to.exists() or beside.exists():
        there = to if to.exists() else beside
        advice = "name another file" if to.exists() else "another backup writes it, or was killed: remove it"
        raise BackupError(f"{there} is there already; {advice}")
    summary = BackupSummary(to)
    try:
        with ExitStack() as stack:
            file = stack.enter_context(open(beside, "xb", opener=_private))
            stack.callback(beside.unlink, missing_ok=True)
            scratch = Path(stack.enter_context(TemporaryDirectory(dir=to.parent, prefix=".asyncpipe-")))
            with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as tar:
                _fill(tar, folder, scratch / STORE, snapshots, summary)
            file.flush()
            os.fsync(file.fileno())
            summary.size = file.tell()
            beside.rename(to)
        sync_folder(to.parent)
    except OSError as error:
        raise BackupError(f"no backup was made: {error.filename or to}: {error.strerror or error}") from error
    return summary


def _fill(tar: tarfile.TarFile, folder: Path, copy: Path, wanted: SnapshotsWanted, summary: BackupSummary) -> None:
    for name in (*LOGS, TOKENS):  # Before the store, which then has all jobs of the audit.
        with suppress(FileNotFoundError):
            _add(tar, folder, folder / name)
    with (
        open_beside(folder / STORE, is_older=True) as live,
        closing(sqlite3.connect(copy, isolation_level=None)) as target,
    ):
        # All pages at once: one state, for which no commit of the service has to wait, since it has a write-ahead log.
        live.backup(target)
        target.execute("PRAGMA journal_mode = DELETE")
        for number, job, attempts in target.execute("SELECT number, id, attempts FROM jobs ORDER BY number").fetchall():
            summary.jobs += 1
            where = folder / "jobs" / job
            if where.is_dir():
                step = _add_snapshots(tar, folder, where / SNAPSHOTS, wanted, summary)
                _copy_losses(live, target, number, step)
                _add_files(tar, folder, where)
            elif attempts:
                summary.problems.append(f"job {job} was started, and {where} is not there")
    tar.add(copy, STORE, filter=_plain)


def _copy_losses(live: sqlite3.Connection, target: sqlite3.Connection, number: int, step: int) -> None:
    """Give the copy of the store the steps until ``step`` that it does not have."""
    (last,) = target.execute("SELECT coalesce(max(step), 0) FROM losses WHERE job = ?", (number,)).fetchone()
    rows = live.execute("SELECT * FROM losses WHERE job = ? AND step > ? AND step <= ?", (number, last, step))
    places = ", ".join("?" * len(rows.description))  # A store of an older version has fewer columns.
    target.executemany(f"INSERT INTO losses VALUES ({places})", rows)  # noqa: S608 - no input


def _add_snapshots(
    tar: tarfile.TarFile, folder: Path, snapshots: Path, wanted: SnapshotsWanted, summary: BackupSummary
) -> int:
    """Add what is wanted of a job's snapshots; the step of the newest one that was added, or 0."""
    newest, tried = 0, set[str]()
    while wanted is not SnapshotsWanted.NONE:
        # Newest first; all of them may be gone before they are opened, and then newer ones are there.
        there = [path for path in snapshots_in(snapshots) if path.name not in tried] if snapshots.is_dir() else []
        for path in reversed(there):
            if newest and wanted is SnapshotsWanted.NEWEST:
                break
            newest = max(newest, _add_snapshot(tar, folder, path, summary))
            tried.add(path.name)
        if newest or not there:
            break
    return newest


def _add_snapshot(tar: tarfile.TarFile, folder: Path, path: Path, summary: BackupSummary) -> int:
    """Add one; its step, or 0 if it was removed meanwhile or is damaged."""
    try:
        manifest = read_manifest(path)
        with ExitStack() as stack:
            files = [stack.enter_context((path / name).open("rb")) for name in ("snapshot.json", *manifest.sha256)]
            for file in files:
                info = _plain(tar.gettarinfo(arcname=str(Path(file.name).relative_to(folder)), fileobj=file))
                tar.addfile(info, file)
    except (OptionError, FolderError, FileNotFoundError) as error:
        if path.exists():
            summary.problems.append(f"not in the backup: {error}")
        return 0
    summary.snapshots += 1
    return manifest.step


def _add_files(tar: tarfile.TarFile, folder: Path, where: Path) -> None:
    """Add the files of a job beside its snapshots."""
    for path in sorted(where.rglob("*")):
        parts = path.relative_to(where).parts
        if path.is_file() and parts[0] != SNAPSHOTS and not path.name.endswith((".incomplete", ".new")):
            with suppress(FileNotFoundError):  # The service has removed it meanwhile.
                _add(tar, folder, path)


def _add(tar: tarfile.TarFile, folder: Path, path: Path) -> None:
    with path.open("rb") as file:  # A log that grows meanwhile is added as it was when it was opened.
        tar.addfile(_plain(tar.gettarinfo(arcname=str(path.relative_to(folder)), fileobj=file)), file)


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = 0o600
    return info


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, stat.S_IRUSR | stat.S_IWUSR)


def restore(backup: Path, folder: Path) -> int:
    """Make ``folder``, which must not be there or be empty, the folder of a service as ``backup`` has it. Blocks.

    Returns the number of jobs. Before the folder appears, the store is checked by SQLite, and each snapshot against the
    SHA-256 of its files. Raises ``BackupError`` for a backup that is damaged, cut off, or none at all, and
    ``StoreError``.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BackupError(f"{folder} is not empty; restore into a new folder, and start the service with that one")
    beside = folder.with_name(f"{folder.name}.restoring")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside.mkdir(mode=0o700)
    except FileExistsError:
        raise BackupError(f"{beside} is there already; remove what is left of another restoration") from None
    except OSError as error:
        raise BackupError(f"cannot restore to {folder}: {error.strerror}") from error
    try:
        with tarfile.open(backup) as tar:
            tar.extractall(beside, filter="data")
        if not (beside / STORE).is_file():
            raise BackupError(f"{backup} is cut off, or no backup: it does not end with {STORE}; use another backup")
        check_store(beside / STORE)
        _check_snapshots(backup, beside)
        with open_beside(beside / STORE, is_older=True) as connection:
            (jobs,) = connection.execute("SELECT count(*) FROM jobs").fetchone()
        for end in ("-wal", "-shm"):
            (beside / f"{STORE}{end}").unlink(missing_ok=True)
        if hasattr(os, "sync"):
            os.sync()  # Before the folder has its name.
        beside.rename(folder)
    except (tarfile.TarError, EOFError, StoreError) as error:
        raise BackupError(f"{backup} is damaged, cut off, or no backup ({error}); use another backup") from error
    except OSError as error:
        where = error.filename or backup
        raise BackupError(f"{backup} was not restored: {where}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return int(jobs)


def _check_snapshots(backup: Path, folder: Path) -> None:
    for path in folder.glob(f"jobs/*/{SNAPSHOTS}/*"):
        try:
            for name, expected in read_manifest(path).sha256.items():
                with (path / name).open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                        raise BackupError(f"{backup} is damaged: {path.relative_to(folder) / name}; use another backup")
        except (OptionError, FolderError) as error:
            raise BackupError(f"{backup} is damaged: {error}; use another backup") from error
