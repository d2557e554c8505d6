"""Edges that break in the middle."""

from __future__ import annotations

import socket
from contextlib import suppress

from asyncpipe.ops.edges.edge_in import EdgeIn

__all__ = ["sever"]


def sever(edge: EdgeIn) -> None:
    """Break the edge, as a network does that is gone: both ends notice it."""
    channel = edge._channel
    with channel._writing, suppress(OSError):
        if channel._open:
            channel._socket.shutdown(socket.SHUT_RDWR)
