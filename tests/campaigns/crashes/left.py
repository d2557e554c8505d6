"""What there is of processes, threads, sockets, files and shared memory, and what of it may be left: nothing."""

from __future__ import annotations

import os
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

__all__ = ["Held", "child_named", "pids_named", "threads_and_files"]


class Held:
    """What this process holds; ``check`` raises ``AssertionError`` if it is more than at the beginning."""

    def __init__(self, *folders: Path) -> None:
        """``folders`` are looked at as well."""
        self._folders = (Path(tempfile.gettempdir()), *folders)
        self._begin = self._now()

    def _now(self) -> dict[str, Counter[str]]:
        descriptors = []
        for name in _entries("/proc/self/fd"):
            with suppress(FileNotFoundError):  # That of the listing itself.
                descriptors.append(os.readlink(f"/proc/self/fd/{name}"))
        found = {
            # Sockets and pipes have numbers of their own.
            "descriptors": Counter(target.partition(":[")[0] for target in descriptors),
            # A loop's own threads (to_thread) wait for more work until it is closed.
            "threads": Counter(
                thread.name for thread in threading.enumerate() if not thread.name.startswith(("asyncio_", "uvloop_"))
            ),
            "descendants": Counter(_descendants("self")),
        }
        for folder in self._folders:
            # Those of Python's multiprocessing, which others on this machine may use, and asyncpipe does not.
            found[str(folder)] = Counter(name for name in _entries(folder) if not name.startswith("sem.mp-"))
        return found

    def check(self) -> None:
        now = self._now()
        more = {what: dict(now[what] - before) for what, before in self._begin.items() if now[what] - before}
        assert not more, f"this is left: {more}"


def threads_and_files(pid: int) -> tuple[int, int]:
    """How many of them another process has."""
    return len(_entries(f"/proc/{pid}/task")), len(_entries(f"/proc/{pid}/fd"))


def pids_named(mark: str) -> list[int]:
    """The processes that live with ``mark`` in their command line."""
    found = []
    for entry in _entries("/proc"):
        try:
            if entry.isdigit() and mark.encode() in Path(f"/proc/{entry}/cmdline").read_bytes():
                found.append(int(entry))
        except OSError:  # It has ended.
            continue
    return found


def child_named(name: str) -> int | None:
    """The descendant of this process whose last argument is ``name``, as it is of a worker, also of one that starts."""
    for entry in _descendants("self"):
        with suppress(OSError):
            if Path(f"/proc/{entry}/cmdline").read_bytes().rstrip(b"\0").endswith(f"\0{name}".encode()):
                return int(entry)
    return None


def _descendants(pid: str) -> list[str]:
    found = []
    for each in _entries(f"/proc/{pid}/task"):
        with suppress(OSError):  # That thread has ended.
            for child in Path(f"/proc/{pid}/task/{each}/children").read_text().split():
                found += [child, *_descendants(child)]
    return found


def _entries(folder: str | Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
