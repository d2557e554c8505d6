"""Who is let in: both sides show that they know the secret, before either reads anything else.

::

    controller                                        worker
        │  greeting, challenge c ─────────────────────▶ │
        │ ◀──── token, challenge w, HMAC("worker", c, w, token)
        │  HMAC("controller", c, w, token) ───────────▶ │

All sizes are fixed, and nothing is unpickled. The names in the digests keep one side's answer from being played back to
it. ``multiprocessing.connection`` has a handshake as well; it blocks, so it needs a thread for each one that connects,
and it is HMAC-MD5 in Python 3.11. The token says which start the worker belongs to.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from typing import Final

__all__ = ["TOKEN_BYTES", "RefusedError", "introduce", "let_in"]

GREETING: Final = b"asyncpipe workers 1\n"
CHALLENGE_BYTES: Final = 32
TOKEN_BYTES: Final = 16
_DIGEST_BYTES: Final = 32


class RefusedError(ConnectionError):
    """The other side does not know the secret, or is no asyncpipe."""


async def let_in(connected: socket.socket, secret: bytes) -> bytes:
    """The token of the worker at the other end of a non-blocking socket. The caller sets a deadline.

    Raises ``RefusedError``, or ``OSError`` where the connection breaks.
    """
    loop = asyncio.get_running_loop()
    challenge = os.urandom(CHALLENGE_BYTES)
    await loop.sock_sendall(connected, GREETING + challenge)
    answer = bytearray(TOKEN_BYTES + CHALLENGE_BYTES + _DIGEST_BYTES)
    view = memoryview(answer)
    while view:
        if not (size := await loop.sock_recv_into(connected, view)):
            raise RefusedError("it closed the connection")
        view = view[size:]
    token, others = bytes(answer[:TOKEN_BYTES]), bytes(answer[TOKEN_BYTES:-_DIGEST_BYTES])
    if not hmac.compare_digest(answer[-_DIGEST_BYTES:], _digest(secret, b"worker", challenge, others, token)):
        raise RefusedError("it does not know the secret")
    await loop.sock_sendall(connected, _digest(secret, b"controller", challenge, others, token))
    return token


def introduce(connected: socket.socket, secret: bytes, token: bytes) -> None:
    """Show a controller at the other end of a blocking socket that this is the worker of ``token``, and check it.

    Raises ``RefusedError``, or ``OSError`` (``TimeoutError`` by the socket's own timeout).
    """
    greeting = _receive(connected, len(GREETING))
    if greeting != GREETING:
        raise RefusedError(f"this is no controller of asyncpipe: it says {greeting!r}")
    challenge, own = _receive(connected, CHALLENGE_BYTES), os.urandom(CHALLENGE_BYTES)
    connected.sendall(token + own + _digest(secret, b"worker", challenge, own, token))
    answer = _receive(connected, _DIGEST_BYTES)
    if not hmac.compare_digest(answer, _digest(secret, b"controller", challenge, own, token)):
        raise RefusedError("the controller does not know the secret")


def _digest(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"|".join([GREETING, *parts]), "sha256")


def _receive(connected: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        if not (part := connected.recv(size - len(received))):
            raise RefusedError("the controller closed the connection")
        received += part
    return received
