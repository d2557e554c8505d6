"""Where workers connect to their controller."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from asyncpipe.errors import EdgeError
from asyncpipe.runtime.process import Process
from asyncpipe.runtime.workers.door import Door
from asyncpipe.runtime.workers.entrance import Entrance
from asyncpipe.runtime.workers.handshake import TOKEN_BYTES
from asyncpipe.runtime.workers.held_folder import HeldFolder
from asyncpipe.runtime.workers.launcher import Address
from asyncpipe.runtime.workers.place import LOOPBACK
from asyncpipe.secured import Secured

__all__ = ["ControlListener"]


class ControlListener:
    """Listens while a worker is expected, on a loop that has ``add_reader``; used on its thread.

    The socket is in a folder that only this user can enter, and that is gone when all have connected.
    """

    def __init__(self, secret: bytes, address: tuple[str, int] | None) -> None:
        """``address`` is a host and a port (0: any) to listen at, a Unix socket in a new folder if it is not given."""
        self._secret = secret
        self.address = address
        """May be set: what listens already goes on where it is."""
        self._expected: dict[bytes, Callable[[Secured], None]] = {}
        self._door: Door | None = None
        self._entrance: Entrance | None = None
        self._process = Process()

    @contextmanager
    def expecting(self, connected: Callable[[Secured], None]) -> Iterator[tuple[Address, bytes]]:
        """Within the block, a worker with the token may connect at the address; ``connected`` gets its connection."""
        if self._door is None:
            self._door = self._open()
            self._entrance = Entrance(self._door.sockets, self._secret, self._welcome, "the workers' controller")
        token = secrets.token_bytes(TOKEN_BYTES)
        self._expected[token] = connected
        try:
            address = self._door.local or self._door.remote
            assert address is not None
            yield address, token
        finally:
            self._expected.pop(token, None)
            if not self._expected and self._process.is_this:
                self._close()

    def _open(self) -> Door:
        if self.address is None:
            with suppress(EdgeError):  # Where the path of a socket would be too long.
                return Door("control", folder=HeldFolder("asyncpipe-control-"))
        host, port = self.address or (LOOPBACK, 0)
        return Door("control", host=host, port=port)

    def _close(self) -> None:
        if self._entrance is not None and self._door is not None:
            self._entrance.close()
            self._door.close()
            self._entrance = self._door = None

    async def _welcome(self, connected: Secured, token: bytes) -> None:
        if (expects := self._expected.pop(token, None)) is None:
            connected.socket.close()  # It comes too late.
        else:
            expects(connected)
