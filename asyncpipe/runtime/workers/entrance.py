"""Where others connect to this process, and only those are let in that know the secret."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from asyncpipe.runtime.workers.handshake import let_in
from asyncpipe.runtime.workers.tcp import prepare
from asyncpipe.secured import Secured

__all__ = ["Entrance"]

_logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0
"""For one that connects to show that it knows the secret, and to say what it is."""
MOST_STRANGERS = 64
"""How many may be doing so at a time. One more, and the first of them is shown out: strangers keep nobody out."""


class Entrance:
    """Accepts connections, on the loop that it is made on, until ``close``. That loop must have ``add_reader``."""

    def __init__(
        self,
        listening: Sequence[socket.socket],
        secret: bytes,
        welcome: Callable[[Secured, bytes], Awaitable[None]],
        name: str,
    ) -> None:
        """``listening`` are non-blocking sockets, which stay the caller's.

        ``welcome`` is awaited with each connection whose other end knows the ``secret``, and with the token that this
        end has shown. It may exchange more, within the same deadline. The connection is its own when it returns, and is
        closed when it raises ``OSError`` or ``ValueError``. ``name`` is what the log calls this place.
        """
        self._loop = asyncio.get_running_loop()
        self._listening = tuple(listening)
        self._secret = secret
        self._welcome = welcome
        self._name = name
        self._strangers: dict[asyncio.Task[None], socket.socket] = {}
        """Those that are still to be let in, the oldest first."""
        for each in self._listening:
            self._loop.add_reader(each, self._accept, each)

    def close(self) -> None:
        """Let nobody in any more."""
        for each in self._listening:
            self._loop.remove_reader(each)
        for task in list(self._strangers):
            self._show_out(task)

    def _accept(self, listening: socket.socket) -> None:
        try:
            stranger, _ = listening.accept()
        except OSError:  # It has gone again, or there are too many open files: others may come.
            return
        stranger.setblocking(False)
        prepare(stranger)
        if len(self._strangers) >= MOST_STRANGERS:
            self._show_out(next(iter(self._strangers)))
        task = self._loop.create_task(self._let_in(stranger), name="asyncpipe handshake")
        self._strangers[task] = stranger
        task.add_done_callback(lambda task: self._strangers.pop(task, None))

    def _show_out(self, task: asyncio.Task[None]) -> None:
        stranger = self._strangers.pop(task)
        task.cancel()
        # A task that is cancelled before it has begun closes nothing. One that has just ended is not cancelled.
        task.add_done_callback(lambda task: stranger.close() if task.cancelled() else None)

    async def _let_in(self, stranger: socket.socket) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await self._welcome(*await let_in(stranger, self._secret))
        except (OSError, ValueError) as error:
            stranger.close()
            if stranger.family != socket.AF_UNIX:  # Which only this user reaches.
                _logger.warning("a connection to %s is refused: %s", self._name, str(error) or "it said nothing")
        except BaseException:
            stranger.close()
            raise
