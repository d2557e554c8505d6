"""Where other processes reach this one, until all have come."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from asyncpipe.errors import EdgeError
from asyncpipe.runtime.workers.held_folder import HeldFolder
from asyncpipe.runtime.workers.launcher import Address

__all__ = ["Door"]


class Door:
    """What is listened at. Opened and closed on any thread."""

    def __init__(
        self, name: int | str, *, folder: str | HeldFolder | None = None, host: str | None = None, port: int = 0
    ) -> None:
        """``name`` is this worker's number, or what the controller is called. It listens in ``folder``, which must be
        this user's alone, for workers of this machine, and at ``host`` and ``port`` (0: any) for those of others.

        A ``HeldFolder`` is removed with the door. Raises ``EdgeError`` if it cannot listen.
        """
        self.name = name
        self._held = folder if isinstance(folder, HeldFolder) else None
        self.local: str | None = None
        """The path for workers of this machine."""
        self.remote: tuple[str, int] | None = None
        """Host and port for others."""
        self.sockets: list[socket.socket] = []
        """What is listened at."""
        self.is_given_up = False
        """Whether ``give_up`` was called."""
        try:
            if folder is not None:
                self.local = str(Path(folder.path if isinstance(folder, HeldFolder) else folder) / str(name))
                self._listen(socket.socket(socket.AF_UNIX), self.local)
            if host is not None:
                listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.remote = self._listen(listening, (host, port)).getsockname()[:2]
        except BaseException:
            self.close()
            raise

    def _listen(self, listening: socket.socket, address: Address) -> socket.socket:
        try:
            listening.bind(address)
        except OSError as error:
            listening.close()
            self.local = None  # Whoever has it.
            short = "; the folder's name must be short (about 100 letters)" if isinstance(address, str) else ""
            raise EdgeError(f"worker {self.name} cannot listen at {address}: {error}{short}") from error
        self.sockets.append(listening)
        listening.listen()
        listening.setblocking(False)
        return listening

    def give_up(self) -> None:
        """Have ``meet`` end, with an ``EdgeError``."""
        self.is_given_up = True

    def close(self) -> None:
        """Let nobody in any more; twice is once."""
        for listening in self.sockets:
            listening.close()
        self.sockets.clear()
        if self.local is not None:
            with suppress(FileNotFoundError):
                os.unlink(self.local)
            self.local = None
        if self._held is not None:
            self._held.remove()
