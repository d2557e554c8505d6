"""Connections whose ends know each other, and the MACs of what they send between hosts.

The handshake of a connection by TCP (``runtime/workers/handshake.py``) gives both ends two keys that no other
connection has, one for each direction. From then on a MAC follows each piece that is sent::

    piece    HMAC-SHA256(key of the direction, number of the piece, piece), its first 16 bytes

So who is on the path between two hosts can change nothing, put nothing in, leave nothing out, and repeat or swap
nothing, of this connection or of another one, without being noticed. Everything can still be read: nothing is
encrypted. Unix sockets, which no other user of the machine reaches, have no keys.
"""

from __future__ import annotations

import hmac
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

__all__ = ["MAC_BYTES", "MacError", "Macs", "Piece", "Secured"]

MAC_BYTES: Final = 16
_NUMBER = struct.Struct("<Q")
Piece = bytes | bytearray | memoryview


class MacError(ValueError):
    """What has arrived is not what the other end has sent next."""


class Macs:
    """Those of one connection, at one end. Sending is for one thread at a time, and so is receiving."""

    def __init__(self, sends: bytes, receives: bytes) -> None:
        """The keys of both directions."""
        self._sends, self._receives = (hmac.new(key, digestmod="sha256") for key in (sends, receives))
        self._sent = self._received = 0
        self._are_right = True

    def sealed(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Each of ``pieces``, which are sent next, and its MAC behind it."""
        for piece in pieces:
            self._sent += 1
            yield piece
            yield _mac(self._sends, self._sent, piece)

    def check(self, piece: Piece, mac: Piece) -> None:
        """Raise ``MacError`` if ``mac`` is not that of ``piece``, the next one that is received, or once was wrong."""
        self._received += 1
        self._are_right = self._are_right and hmac.compare_digest(_mac(self._receives, self._received, piece), mac)
        if not self._are_right:
            raise MacError("what came is not what the other end has sent: its MAC is wrong")


class Secured(NamedTuple):
    """A connection whose other end has shown that it knows the secret."""

    socket: socket.socket
    macs: Macs | None = None
    """``None`` for a Unix socket."""


def _mac(key: hmac.HMAC, number: int, piece: Piece) -> bytes:
    found = key.copy()
    found.update(_NUMBER.pack(number))
    found.update(piece)
    return found.digest()[:MAC_BYTES]
