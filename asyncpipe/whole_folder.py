"""A folder of files that is written as a whole or not at all, and verified when it is read.

::

    step-10.incomplete/   files, each on disk ─▶ the manifest, last
    step-10/              by one rename, so it is complete even after a crash
    step-10.former/       what had this name before, until the new one has it

The manifest is a JSON file with a description, the SHA-256 of each other file, and a checksum of itself. The checksums
find later damage.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from asyncpipe.errors import AsyncpipeError, OptionError

__all__ = [
    "MANIFEST",
    "FolderError",
    "check_files",
    "file_sum",
    "manifest_checksum",
    "needs_intervention",
    "new_folder",
    "newest_of",
    "read_about",
    "sync_folder",
    "unreadable",
    "write_about",
]

MANIFEST: Final = "snapshot.json"


class FolderError(AsyncpipeError, OSError):
    """A folder of snapshots cannot be used now, for a reason that may pass: no space left, too many open files."""


@contextmanager
def new_folder(final: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder for the files of ``final``, which gets that name at the end of the block, and is removed after an error.

    ``replace``: ``final`` may be there already, and what a killed process has left beside it is in the way of nothing.
    Blocks until everything is on disk.
    """
    incomplete, former = _beside(final, "incomplete"), _beside(final, "former")
    if replace:
        final.parent.mkdir(parents=True, exist_ok=True)
        if former.exists() and not final.exists():
            former.rename(final)
        for left in (incomplete, former):
            if left.exists():
                shutil.rmtree(left)
    incomplete.mkdir()
    try:
        yield incomplete
        sync_folder(incomplete)
        if replace and final.exists():
            final.rename(former)
        incomplete.rename(final)
        sync_folder(final.parent)
    except BaseException:
        shutil.rmtree(incomplete, ignore_errors=True)
        raise
    if replace:
        shutil.rmtree(former, ignore_errors=True)


def newest_of(final: Path) -> Path:
    """The folder of that name; or the former one, if its writer was killed when that had no name."""
    former = _beside(final, "former")
    return former if former.exists() and not final.exists() else final


def _beside(final: Path, what: str) -> Path:
    return final.with_name(f"{final.name}.{what}")


def sync_folder(folder: Path) -> None:
    """Write the directory entries of ``folder`` to disk, on systems that support it. Blocks.

    Without that a power failure can lose a file whose content is there.
    """
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sum(path: Path, *, sync: bool = False) -> str:
    """The SHA-256 of a file, and with ``sync`` its content is on disk then. Blocks."""
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


# The manifest


def write_about(folder: Path, about: Mapping[str, Any]) -> None:
    """Write the manifest: ``about``, which has the sums of all files in ``folder``. Blocks until it is on disk."""
    with (folder / MANIFEST).open("x", encoding="utf-8") as file:
        json.dump({**about, "checksum": manifest_checksum(about)}, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def manifest_checksum(about: Mapping[str, Any]) -> str:
    """The checksum of a manifest's content, independent of its layout in the file."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def read_about(folder: Path, formats: Collection[int]) -> dict[str, Any]:
    """What the manifest says, of one of these ``formats``. Blocks.

    Raises ``OptionError`` with a line that says what is wrong, or ``FolderError`` if it cannot be read now.
    """
    try:
        about = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(folder, MANIFEST, error) from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{folder}: {MANIFEST} is damaged: {type(error).__name__}") from error
    version = about.get("format") if isinstance(about, dict) else None
    if type(version) is int and version not in formats:
        known = f"format{'s' if len(formats) > 1 else ''} {' and '.join(map(str, formats))}"
        raise OptionError(f"{folder}: is written in format {version}, this version of asyncpipe reads {known}")
    if not isinstance(about, dict) or about.pop("checksum", None) != manifest_checksum(about):
        raise OptionError(f"{folder}: {MANIFEST} is damaged: it does not match its checksum")
    return about


def check_files(folder: Path, sums: Mapping[str, str]) -> None:
    """Raise as ``read_about`` unless each file in ``folder`` has the SHA-256 that it was written with. Blocks."""
    for name, expected in sums.items():
        try:
            intact = file_sum(folder / name) == expected
        except OSError as error:
            raise unreadable(folder, name, error) from error
        if not intact:
            raise OptionError(f"{folder}: {name} is damaged: its SHA-256 is not the one that it was written with")


def needs_intervention(error: OSError) -> bool:
    """Whether ``error`` is about names or permissions, so that it remains until somebody changes them."""
    return isinstance(
        error, FileExistsError | FileNotFoundError | IsADirectoryError | NotADirectoryError | PermissionError
    )


def unreadable(folder: Path, name: str, error: OSError) -> AsyncpipeError:
    """The error to raise for a file that cannot be read. An I/O error of the disk counts as damage."""
    problem = f"{folder}: {name} cannot be read: {error.strerror}"
    is_damage = needs_intervention(error) or error.errno == errno.EIO
    return OptionError(problem) if is_damage else FolderError(problem)
