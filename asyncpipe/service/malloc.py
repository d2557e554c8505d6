"""How many heaps the C library keeps: what is freed in one of them is no use to threads that have another.

glibc gives threads a heap (an *arena*) each, up to eight per core, and freed pieces stay in theirs. Where threads and
jobs come and go for weeks, each arena so gets its own peak and keeps most of it: a process that holds ever the same
takes more and more memory. With one arena for each thread that allocates all the time it does not, and those threads
still do not wait for each other.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["limit_arenas"]

M_ARENA_MAX = -8
"""Of ``malloc.h``."""
SHARED = 2
"""For loops, the store and whatever else runs in threads."""


def limit_arenas(devices: int) -> int | None:
    """Let this process have an arena for each device's thread, and two; returns how many, ``None`` if nothing was done.

    Those that there are already stay, so call it before torch is imported. It is for who owns the process, and who
    embeds a service may call it as well. Whoever has set ``MALLOC_ARENA_MAX`` knows better, and other C libraries than
    glibc are left alone.
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
