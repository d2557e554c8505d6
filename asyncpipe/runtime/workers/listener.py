"""Where workers connect to their controller."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncpipe.runtime.process import Process
from asyncpipe.runtime.workers.entrance import Entrance
from asyncpipe.runtime.workers.handshake import TOKEN_BYTES
from asyncpipe.runtime.workers.held_folder import HeldFolder
from asyncpipe.runtime.workers.launcher import Address

__all__ = ["ControlListener"]

LONGEST_PATH = 100
"""Bytes. Linux takes 107 for a Unix socket, other systems fewer."""
LOOPBACK = ("127.0.0.1", 0)


class ControlListener:
    """Listens while a worker is expected, on a loop that has ``add_reader``; used on its thread.

    The socket is in a folder that only this user can enter, and that is gone when all have connected.
    """

    def __init__(self, secret: bytes, address: Address | None) -> None:
        """``address`` is where to listen, a Unix socket in a new folder if it is not given."""
        self._secret = secret
        self.address = address
        """May be set: what listens already goes on where it is."""
        self._expected: dict[bytes, Callable[[socket.socket], None]] = {}
        self._entrance: Entrance | None = None
        self._process = Process()
        self._socket: socket.socket | None = None
        self._folder: HeldFolder | None = None

    @contextmanager
    def expecting(self, connected: Callable[[socket.socket], None]) -> Iterator[tuple[Address, bytes]]:
        """Within the block, a worker with the token may connect at the address; ``connected`` gets its socket."""
        if self._socket is None:
            self._socket = self._open()
        token = secrets.token_bytes(TOKEN_BYTES)
        self._expected[token] = connected
        try:
            address = self._socket.getsockname()
            yield (address if isinstance(address, str) else address[:2]), token
        finally:
            self._expected.pop(token, None)
            if not self._expected:
                self._close()

    def _open(self) -> socket.socket:
        address = self.address
        if address is None:
            self._folder = HeldFolder("asyncpipe-control-")
            address = os.path.join(self._folder.path, "control")
            if len(os.fsencode(address)) > LONGEST_PATH:
                self._remove_folder()
                address = LOOPBACK
        if isinstance(address, str):
            listening = socket.socket(socket.AF_UNIX)
            try:
                listening.bind(address)
                listening.listen()
            except OSError:
                listening.close()
                self._remove_folder()
                raise
        else:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            listening = socket.create_server(address, family=family)
        listening.setblocking(False)
        self._entrance = Entrance([listening], self._secret, self._welcome, "the workers' controller")
        return listening

    def _close(self) -> None:
        if self._entrance is not None and self._socket is not None:
            self._entrance.close()
            if self._folder is None and isinstance(path := self._socket.getsockname(), str):
                os.unlink(path)
            self._socket.close()
            self._socket = None
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None and self._process.is_this:
            self._folder.remove()
        self._folder = None

    async def _welcome(self, connected: socket.socket, token: bytes) -> None:
        if (expects := self._expected.pop(token, None)) is None:
            connected.close()  # It comes too late.
        else:
            expects(connected)
