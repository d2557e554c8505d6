"""TCP connections between workers, and to their controller."""

from __future__ import annotations

import asyncio
import socket

__all__ = ["GONE_SECONDS", "connected_by_tcp", "prepare"]

GONE_SECONDS = 10
"""Without any sign of the other host, after which a connection breaks: its cable is pulled, or its power is gone."""
IDLE_SECONDS = 2
BETWEEN_SECONDS = 2


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
        "TCP_USER_TIMEOUT": GONE_SECONDS * 1000,
    }
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:  # Not every system has all.
            connected.setsockopt(socket.IPPROTO_TCP, option, value)


async def connected_by_tcp(address: tuple[str, int]) -> socket.socket:
    """A non-blocking connection to a host and a port, which are numbers or names. Raises ``OSError``."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
    family, kind, protocol, _, there = found[0]
    connected = socket.socket(family, kind, protocol)
    try:
        connected.setblocking(False)
        prepare(connected)
        await loop.sock_connect(connected, there)
    except BaseException:
        connected.close()
        raise
    return connected
