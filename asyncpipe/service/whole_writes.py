"""Writes that are in a file completely or not at all, for files of lines on disks that may be full."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["write_whole"]


def write_whole(descriptor: int, data: bytes, at: int) -> None:
    """Write ``data`` at the end of the file, which is ``at`` bytes long.

    Raises ``OSError``; the file is cut back to ``at`` bytes then.
    """
    try:
        os.lseek(descriptor, at, os.SEEK_SET)
        written = 0
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, at)
        raise
