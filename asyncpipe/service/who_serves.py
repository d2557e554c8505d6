"""Which ``asyncpipe serve`` has a folder: the file ``serve.json`` in it, which that process holds locked while it runs.

The lock of the store would not do: an application that embeds a service has that one as well, and SIGHUP would end it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["ServeProcess", "announced", "server_of"]

FILE = "serve.json"
ROOM = 8192
"""Bytes of the file, which is written at once, so that nobody reads a half of it."""


class ServeProcess(NamedTuple):
    """A process, and what came of reading its settings again."""

    host: str
    pid: int
    reads: int = 0
    """How often it has read them again."""
    said: str = ""
    """What came of the last time."""
    is_wrong: bool = False
    """Whether the settings were wrong then."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@contextmanager
def announced(folder: Path) -> Iterator[Callable[[str, bool], None]]:
    """Say during the block that this process serves ``folder``. The function notes ``said`` and ``is_wrong``."""
    server = ServeProcess(socket.gethostname(), os.getpid(), reads=-1)
    file = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o600)

    def note(said: str, is_wrong: bool) -> None:
        nonlocal server
        server = server._replace(reads=server.reads + 1, said=said[: ROOM // 8], is_wrong=is_wrong)
        os.pwrite(file, json.dumps(server._asdict(), ensure_ascii=False).ljust(ROOM).encode(errors="replace"), 0)

    try:
        fcntl.lockf(file, fcntl.LOCK_EX)  # Who has the store has this as well, but for those who look.
        note("", False)
        yield note
    finally:
        os.close(file)


def server_of(folder: Path) -> ServeProcess | None:
    """The process that serves ``folder`` now, if there is one; not to be called in that process."""
    with suppress(FileNotFoundError, ValueError), (folder / FILE).open("r+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return ServeProcess(**json.load(file))
    return None
