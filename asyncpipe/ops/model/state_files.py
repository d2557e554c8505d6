"""A state in a file: written with a checksum of what is on disk, and read without executing what is in it.

States are nested dicts, lists and tuples of tensors and plain values. Files are ``torch.save``'s.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from copy import copy, deepcopy
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncpipe.ops.model.sharded import whole

__all__ = ["copied_to_cpu", "read_state", "write_state"]

_ZIP_MAGIC = b"PK\x03\x04"
"""The first bytes of a file that ``torch.save`` has written."""


class _HashingFile(BufferedWriter):
    """A new file that computes the SHA-256 of what is written. Neither hashing nor writing holds the GIL."""

    def __init__(self, path: Path) -> None:
        super().__init__(FileIO(path, "xb"))
        self.sha256 = hashlib.sha256()

    def write(self, data: Any, /) -> int:
        """Write all of ``data``."""
        self.sha256.update(data)
        return super().write(data)


def write_state(path: Path, state: Any) -> str:
    """Write ``state`` to disk, as a new file; returns its SHA-256. Blocks until it is there.

    Raises ``OSError``, and ``TypeError`` for a state that ``read_state`` would refuse.
    """
    with _HashingFile(path) as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
        sha256 = file.sha256.hexdigest()
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(path):
        raise TypeError(f"{path.stem} holds {', '.join(sorted(unsafe))}; use tensors and plain Python values only")
    return sha256


def read_state(path: Path, *, mapped: bool = False) -> Any:
    """The state in a file, with tensors on the CPU. Blocks.

    ``mapped``: a tensor's values stay in the file, from which the system reads them where they are used; nobody may
    write to the file then. Raises ``pickle.UnpicklingError`` for a file that holds more than tensors and plain values,
    and whatever torch raises for one that is damaged.
    """
    with path.open("rb") as file:
        if file.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC:
            raise pickle.UnpicklingError  # A bare pickle, which torch would load; we never write one.
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


_CopiedTensors = dict[tuple[object, ...], Tensor]


def copied_to_cpu(value: Any) -> Any:
    """A deep copy of ``value`` with its tensors on the CPU; a tensor that occurs twice is copied once.

    DTensors are whole in it, so all of a group must call this at once.
    """
    return _on_cpu(value, {})


def _on_cpu(value: Any, copies: _CopiedTensors) -> Any:
    if isinstance(value, Tensor):
        value = whole(value)
        if value.layout is not torch.strided or not value.data_ptr():  # It has no address to be known by.
            return value.detach().to("cpu", copy=True)
        key = (value.device, value.dtype, value.data_ptr(), value.shape, value.stride())
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]
    if isinstance(value, dict):
        copied = copy(value)  # Keeps the attribute in which the state of a module has its versions.
        copied.update((key, _on_cpu(entry, copies)) for key, entry in value.items())
        return copied
    if isinstance(value, list):
        return [_on_cpu(entry, copies) for entry in value]
    if type(value) is tuple:
        return tuple(_on_cpu(entry, copies) for entry in value)
    return deepcopy(value)
