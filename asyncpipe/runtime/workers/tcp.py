"""Connections between workers, and to their controller: by Unix sockets on one machine, by TCP between machines."""

from __future__ import annotations

import asyncio
import socket

from asyncpipe.runtime.workers.launcher import Address

__all__ = ["GONE_SECONDS", "connect", "prepare"]

GONE_SECONDS = 10
"""Without any sign of the other host, after which an idle connection breaks: its cable is pulled, or its power gone."""
IDLE_SECONDS = 2
BETWEEN_SECONDS = 2
BLOCKED_SECONDS = 25
"""For what was sent to arrive, or for room for it: longer than a worker may be silent, since nothing is read while a
thread holds the GIL."""


def prepare(connected: socket.socket) -> None:
    """Have small messages sent at once, and notice a host that is gone without a word. Does nothing to Unix sockets.

    The system asks: it answers for a process that is stopped as well, unless what is sent to that piles up.
    """
    if connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": IDLE_SECONDS,
        "TCP_KEEPINTVL": BETWEEN_SECONDS,
        "TCP_KEEPCNT": (GONE_SECONDS - IDLE_SECONDS) // BETWEEN_SECONDS,
        # While something that was sent has not arrived, nothing is asked.
        "TCP_USER_TIMEOUT": BLOCKED_SECONDS * 1000,
    }
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:  # Not every system has all.
            connected.setsockopt(socket.IPPROTO_TCP, option, value)


async def connect(address: Address) -> socket.socket:
    """A non-blocking connection to the path of a Unix socket, or to a host and a port. Raises ``OSError``."""
    loop = asyncio.get_running_loop()
    family: int = socket.AF_UNIX
    there: object = address
    if not isinstance(address, str):
        family, _, _, _, there = (await loop.getaddrinfo(*address, type=socket.SOCK_STREAM))[0]
    connected = socket.socket(family)
    try:
        connected.setblocking(False)
        prepare(connected)
        if isinstance(address, str):
            connected.connect(address)  # At once or not at all. The loop would take ``EAGAIN`` for a beginning.
        else:
            await loop.sock_connect(connected, there)  # type: ignore[arg-type]
    except BaseException:
        connected.close()
        raise
    return connected
