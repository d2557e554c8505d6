"""Limits the number of heaps (arenas) of the C library, so that a process that runs for weeks does not grow.

glibc gives threads arenas of their own, up to eight per core, and memory that is freed in one arena is not reused by
threads of another. Where threads and jobs come and go, each arena reaches its own peak and keeps most of it, so the
process grows although it holds no more. With about one arena for each thread that allocates all the time, it does not
grow, and these threads still do not wait for each other.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["limit_arenas"]

M_ARENA_MAX = -8
"""The parameter of ``mallopt``, from ``malloc.h``."""
SHARED = 2
"""Arenas for event loops, the store and other threads."""


def limit_arenas(devices: int) -> int | None:
    """Limit this process to an arena for each device's thread and two more; returns the limit, ``None`` if not set.

    Existing arenas stay, so call it before torch is imported. ``asyncpipe serve`` calls it; an application that embeds
    a service may do so too. Does nothing if ``MALLOC_ARENA_MAX`` is set, or with another C library than glibc.
    """
    if "MALLOC_ARENA_MAX" in os.environ or not _is_glibc():
        return None
    arenas = devices + SHARED
    return arenas if ctypes.CDLL(None).mallopt(M_ARENA_MAX, arenas) else None


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # No such name, or not even the function.
        return False
