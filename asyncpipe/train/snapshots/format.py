"""The files of a snapshot: written whole or not at all, and read back only as they were written.

::

    step-N/   model.pt        the model's state, under the unsplit model's keys
              optimizer.pt    the optimizer's, in the order of the unsplit model's parameters
              run.pt          step, random numbers, place in the data, recent losses (``run_state.py``)
              NAME.pt         whatever else the workload has joined in
              snapshot.json   what it is, the SHA-256 of each of the other files, and a checksum of itself

A folder that is called ``step-N`` was whole when it got its name, whenever the process or the machine ended; what
happened to it since is what the sums are for. ``torch.load(weights_only=True)`` reads the files, here and anywhere:
nothing that is pickled in them is executed, and a state that it could not read back is not written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

import torch

from asyncpipe.errors import AsyncpipeError, OptionError

__all__ = [
    "FORMAT",
    "LEFT_OVER",
    "STATE_NAME",
    "WHOLE",
    "FolderError",
    "Snapshot",
    "is_lasting",
    "read_about",
    "read_snapshot",
    "write_snapshot",
]

FORMAT = 1
"""Of ``snapshot.json``; another number where a reader of this one would be misled."""

WHOLE = re.compile(r"step-(0|[1-9][0-9]*)")
LEFT_OVER = re.compile(r"step-[0-9]+\.incomplete")
STATE_NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)
"""What a state may be called; its file is ``NAME.pt``."""

_ABOUT = "snapshot.json"
_ARCHIVE = b"PK\x03\x04"
"""How the files of ``torch.save`` begin."""


class FolderError(AsyncpipeError, OSError):
    """A folder of snapshots cannot be used now, for a reason that may pass: no room, too many open files."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What is in one, in the host's memory."""

    path: Path
    about: Mapping[str, Any]
    """What ``snapshot.json`` says."""
    states: dict[str, Any]
    """The states by their names, tensors on the CPU."""

    @property
    def step(self) -> int:
        """How many steps were done."""
        step: int = self.about["step"]
        return step


class _HashedFile(BufferedWriter):
    """A new file that knows the SHA-256 of what was written. Neither that nor writing holds the interpreter's lock."""

    def __init__(self, path: Path) -> None:
        super().__init__(FileIO(path, "xb"))
        self.sha256 = hashlib.sha256()

    def write(self, data: Any, /) -> int:
        """Write ``data``, all of it."""
        self.sha256.update(data)
        return super().write(data)


def write_snapshot(final: Path, states: Mapping[str, Any], about: Mapping[str, Any]) -> Path:
    """``final``, in which there is one file for each state, and all of it on disk.

    Blocks. Raises ``OSError``, ``TypeError`` for a state that could not be read back safely; leaves nothing then.
    """
    incomplete = final.with_name(f"{final.name}.incomplete")
    incomplete.mkdir()
    try:
        sums = {f"{name}.pt": _write_state(incomplete / f"{name}.pt", state) for name, state in states.items()}
        whole = {**about, "format": FORMAT, "sha256": sums}
        with (incomplete / _ABOUT).open("x", encoding="utf-8") as file:
            json.dump({**whole, "checksum": _checksum(whole)}, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(incomplete)
        incomplete.rename(final)
        _sync_folder(final.parent)
    except BaseException:
        shutil.rmtree(incomplete, ignore_errors=True)
        raise
    return final


def _write_state(path: Path, state: Any) -> str:
    """The SHA-256 of the file at ``path``, which holds ``state`` and is on disk."""
    with _HashedFile(path) as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
        sha256 = file.sha256.hexdigest()
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(path):
        raise TypeError(f"{path.stem} holds {', '.join(sorted(unsafe))}; use tensors and plain Python values only")
    return sha256


def _checksum(about: Mapping[str, Any]) -> str:
    """Of what ``snapshot.json`` says, however it is laid out."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    """Bring the names in ``folder`` to the disk, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading


def read_snapshot(path: Path, needed: Iterable[str] = ()) -> Snapshot:
    """What is in the snapshot at ``path``, once every sum is right. Blocks; executes nothing of it.

    Raises ``OptionError`` that says in one line what is wrong: something is missing, torn or changed, is no tensor
    or plain value, lacks one of the states ``needed``, or was written in another format. Raises ``FolderError`` where
    nothing is known to be wrong with it, but the system does not let it be read now.
    """
    about = read_about(path)
    sums: dict[str, str] = about["sha256"]
    if missing := [name for name in needed if f"{name}.pt" not in sums]:
        raise OptionError(f"{path}: has no {', '.join(f'{name}.pt' for name in missing)}")
    for name, wanted in sums.items():
        try:
            with (path / name).open("rb") as file:
                is_right = hashlib.file_digest(file, "sha256").hexdigest() == wanted
        except OSError as error:
            raise _unreadable(path, name, error) from error
        if not is_right:
            raise OptionError(f"{path}: {name} is damaged: it does not have the SHA-256 that it was written with")
    return Snapshot(path, about, {name.removesuffix(".pt"): _read_state(path, name) for name in sums})


def read_about(path: Path) -> dict[str, Any]:
    """What the ``snapshot.json`` of the snapshot at ``path`` says; raises as ``read_snapshot`` does. Blocks."""
    try:
        about = json.loads((path / _ABOUT).read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(path, _ABOUT, error) from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path}: {_ABOUT} is damaged: {type(error).__name__}") from error
    written_as = about.get("format") if isinstance(about, dict) else None
    if type(written_as) is int and written_as != FORMAT:
        problem = f"is written in format {written_as}, this version of asyncpipe reads format {FORMAT}"
        raise OptionError(f"{path}: {problem}")
    if not isinstance(about, dict) or about.pop("checksum", None) != _checksum(about):
        raise OptionError(f"{path}: {_ABOUT} is damaged: it does not have its checksum")
    if not _is_sound(about):
        raise OptionError(f"{path}: {_ABOUT} does not describe a snapshot")
    return about


def is_lasting(error: OSError) -> bool:
    """Whether ``error`` is about names and rights, which stay until somebody changes them."""
    return isinstance(
        error, FileExistsError | FileNotFoundError | IsADirectoryError | NotADirectoryError | PermissionError
    )


def _unreadable(path: Path, name: str, error: OSError) -> AsyncpipeError:
    """What to raise where ``error`` kept a file from being read. A disk that cannot read it has damaged it."""
    problem = f"{path}: {name} cannot be read: {error.strerror}"
    return OptionError(problem) if is_lasting(error) or error.errno == errno.EIO else FolderError(problem)


def _is_sound(about: dict[str, Any]) -> bool:
    """Whether those who read ``about`` find what they rely on, and its files are all in its own folder."""
    sums = about.get("sha256")
    return (
        _is_count(about.get("step"))
        and isinstance(sums, dict)
        and all(name.endswith(".pt") and STATE_NAME.fullmatch(name.removesuffix(".pt")) for name in sums)
        and all(isinstance(about.get(key, {}), dict) for key in ("parameters", "versions"))
        and _is_count(about.get("number", 0))
    )


def _is_count(value: object) -> bool:
    """Whether ``value`` is an integer of at least 0."""
    return type(value) is int and value >= 0


def _read_state(path: Path, name: str) -> Any:
    try:
        with (path / name).open("rb") as file:
            if file.read(len(_ARCHIVE)) != _ARCHIVE:
                # A bare pickle, which torch reads as well: it is not ours.
                raise pickle.UnpicklingError
        return torch.load(path / name, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except OSError as error:
        raise _unreadable(path, name, error) from error
    except pickle.UnpicklingError as error:
        # The sums were right: it was written so. What it would have called is not for this process to run.
        raise OptionError(f"{path}: {name} is refused: it holds more than tensors and plain values") from error
    except Exception as error:
        raise OptionError(f"{path}: {name} is no file of torch.save: {type(error).__name__}") from error
