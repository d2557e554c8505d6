"""Under what name a process is listed by ``ps`` and ``top``."""

from __future__ import annotations

import ctypes
from pathlib import Path

__all__ = ["ROOM", "set_title"]

ROOM = 64
"""Bytes of the last argument of a process that may be listed under another name later."""
_START, _END = 45, 46
"""Of the arguments, among what follows the command in ``/proc/self/stat``; see proc(5)."""


def set_title(title: str) -> None:
    """List this process with ``title`` as its last argument, which must have had ``ROOM`` bytes. Linux only."""
    values = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    end = int(values[_END]) - 1
    if end - ROOM < int(values[_START]):  # Not told, or no such argument.
        return
    ctypes.memmove(end - ROOM, title.encode()[:ROOM].ljust(ROOM, b"\0"), ROOM)
