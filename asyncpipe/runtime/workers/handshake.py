"""Who is let in: both sides show that they know the secret, before either reads anything else.

Workers show each other in the same way who they are (``meeting.py``), with a secret that follows from the controller's.

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
from collections.abc import Generator
from typing import Final, TypeVar

__all__ = ["TOKEN_BYTES", "RefusedError", "Steps", "introduce", "introducing", "let_in", "letting_in", "secret_for"]

_Result = TypeVar("_Result")

GREETING: Final = b"asyncpipe workers 1\n"
CHALLENGE_BYTES: Final = 32
TOKEN_BYTES: Final = 16
_DIGEST_BYTES: Final = 32


class RefusedError(ConnectionError):
    """The other side does not know the secret, or is no asyncpipe."""


Steps = Generator[tuple[bytes, int], bytes, _Result]
"""One side of an exchange, without a socket: yields what to send and how many bytes to read then, and is sent these."""


def letting_in(secret: bytes) -> Steps[bytes]:
    """The controller's side; returns the token. Raises ``RefusedError``."""
    challenge = os.urandom(CHALLENGE_BYTES)
    answer = yield GREETING + challenge, TOKEN_BYTES + CHALLENGE_BYTES + _DIGEST_BYTES
    token, others = answer[:TOKEN_BYTES], answer[TOKEN_BYTES:-_DIGEST_BYTES]
    if not hmac.compare_digest(answer[-_DIGEST_BYTES:], _digest(secret, b"worker", challenge, others, token)):
        raise RefusedError("it does not know the secret")
    yield _digest(secret, b"controller", challenge, others, token), 0
    return token


def introducing(secret: bytes, token: bytes) -> Steps[None]:
    """The worker's side. Raises ``RefusedError``."""
    greeting = yield b"", len(GREETING)
    if greeting != GREETING:
        raise RefusedError(f"this is no controller of asyncpipe: it says {greeting!r}")
    challenge, own = (yield b"", CHALLENGE_BYTES), os.urandom(CHALLENGE_BYTES)
    answer = yield token + own + _digest(secret, b"worker", challenge, own, token), _DIGEST_BYTES
    if not hmac.compare_digest(answer, _digest(secret, b"controller", challenge, own, token)):
        raise RefusedError("the controller does not know the secret")


def secret_for(secret: bytes, purpose: str) -> bytes:
    """Another secret that follows from ``secret``, and does not tell it."""
    return _digest(secret, b"secret", purpose.encode())


async def let_in(connected: socket.socket, secret: bytes) -> bytes:
    """The token of the worker at the other end of a non-blocking socket. The caller sets a deadline.

    Raises ``RefusedError``, or ``OSError`` where the connection breaks.
    """
    loop = asyncio.get_running_loop()
    steps, read = letting_in(secret), b""
    while True:
        try:
            data, count = steps.send(read) if read else next(steps)
        except StopIteration as end:
            token: bytes = end.value
            return token
        await loop.sock_sendall(connected, data)
        answer = bytearray(count)
        view = memoryview(answer)
        while view:
            if not (size := await loop.sock_recv_into(connected, view)):
                raise RefusedError("it closed the connection")
            view = view[size:]
        read = bytes(answer)


def introduce(connected: socket.socket, secret: bytes, token: bytes) -> None:
    """Show a controller at the other end of a blocking socket that this is the worker of ``token``, and check it.

    Raises ``RefusedError``, or ``OSError`` (``TimeoutError`` by the socket's own timeout).
    """
    steps, read = introducing(secret, token), b""
    while True:
        try:
            data, count = steps.send(read) if read else next(steps)
        except StopIteration:
            return
        connected.sendall(data)
        read = _receive(connected, count)


def _digest(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"|".join([GREETING, *parts]), "sha256")


def _receive(connected: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        if not (part := connected.recv(size - len(received))):
            raise RefusedError("the controller closed the connection")
        received += part
    return received
