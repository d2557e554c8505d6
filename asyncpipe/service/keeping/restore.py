"""Makes the folder of a service from a backup: all of it, checked, or nothing."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from asyncpipe.service.keeping.archive import CONTENTS, FORMAT, BackupError, HashedReader, is_safe
from asyncpipe.service.store.database import STORE, check_store

__all__ = ["RestoreSummary", "restore"]

MOST_CONTENTS = 2**30
"""Bytes of the list of contents that is read."""


@dataclass(frozen=True, slots=True)
class RestoreSummary:
    """What was restored."""

    folder: Path
    jobs: int
    files: int
    at: float
    """The Unix time at which the backup began."""


def restore(backup: Path, folder: Path) -> RestoreSummary:
    """Make ``folder``, which must not be there or be empty, the folder of a service again as ``backup`` has it. Blocks.

    Each file is checked against its SHA-256, and the store by SQLite, before the folder appears. Raises
    ``BackupError`` for a backup that is damaged, cut off, of a newer version, or none at all, and ``StoreError``.
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
        about = _extracted(backup, beside)
        check_store(beside / STORE)
        (beside / f"{STORE}-wal").unlink(missing_ok=True)
        (beside / f"{STORE}-shm").unlink(missing_ok=True)
        if hasattr(os, "sync"):
            os.sync()  # Before the folder has its name.
        beside.rename(folder)
    except OSError as error:
        where = error.filename or backup
        raise BackupError(f"{backup} was not restored: {where}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return RestoreSummary(folder, int(about["jobs"]), len(about["sha256"]), float(about["at"]))


def _extracted(backup: Path, folder: Path) -> dict[str, Any]:
    """The description of the backup, whose files are in ``folder`` now, each as it was."""
    sums: dict[str, str] = {}
    about: dict[str, Any] | None = None
    try:
        with tarfile.open(backup, "r|") as tar:
            for member in tar:
                if about is not None or not member.isreg() or not is_safe(member.name) or member.name in sums:
                    _refuse(backup, f"holds {member.name!r:.200} where it cannot be")
                file: Any = tar.extractfile(member)
                if member.name == CONTENTS:
                    about = _contents(backup, file.read(MOST_CONTENTS))
                else:
                    sums[member.name] = _written(folder / member.name, file)
    except (tarfile.TarError, EOFError) as error:
        _refuse(backup, f"is cut off, or no backup ({error})")
    if about is None:
        _refuse(backup, f"is cut off, or no backup: it does not end with {CONTENTS}")
    if wrong := sorted(
        name for name in sums.keys() | about["sha256"].keys() if sums.get(name) != about["sha256"].get(name)
    ):
        _refuse(backup, f"is damaged: {len(wrong)} of its files are not as they were written, as {wrong[0]}")
    if STORE not in sums:
        _refuse(backup, f"has no {STORE}")
    return about


def _contents(backup: Path, text: bytes) -> dict[str, Any]:
    try:
        about = json.loads(text)
        if about["format"] != FORMAT:
            _refuse(backup, f"has format {about['format']}; this version of asyncpipe reads format {FORMAT}")
        float(about["at"]), int(about["jobs"]), dict(about["sha256"])
    except (ValueError, KeyError, TypeError, RecursionError):
        _refuse(backup, f"is damaged: its {CONTENTS} cannot be read")
    found: dict[str, Any] = about
    return found


def _written(path: Path, file: Any) -> str:
    """The SHA-256 of ``file``, which is copied to ``path``."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    source: Any = HashedReader(file)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy:
        shutil.copyfileobj(source, copy)
    return str(source.sha256)


def _refuse(backup: Path, problem: str) -> NoReturn:
    raise BackupError(f"{backup} {problem}; use another backup") from None
