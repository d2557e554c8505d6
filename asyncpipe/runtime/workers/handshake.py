"""Who is let in: both sides show that they know the secret, before either reads anything else.

Workers show each other in the same way who they are (``meeting.py``), with a secret that follows from the controller's;
so do the processes that torchrun has started (``torchrun.py``).

::

    controller                                        worker
        │  greeting, challenge c ─────────────────────▶ │
        │ ◀──── token, challenge w, HMAC("worker", c, w, token)
        │  HMAC("controller", c, w, token) ───────────▶ │

All sizes are fixed, and nothing is unpickled. The names in the digests keep one side's answer from being played back to
it. ``multiprocessing.connection`` has a handshake as well; it blocks, so it needs a thread for each one that connects,
and it is HMAC-MD5 in Python 3.11. The token says which start the worker belongs to. By TCP, the keys of all that
follows (``asyncpipe/secured.py``) come from the secret and both challenges.

All functions use non-blocking sockets on the running loop. The caller sets a deadline.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import socket
import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

from asyncpipe.secured import MAC_BYTES, Macs, Secured

__all__ = ["TOKEN_BYTES", "RefusedError", "introduce", "let_in", "receive_values", "secret_for", "send_values"]

GREETING: Final = b"asyncpipe workers 2\n"
CHALLENGE_BYTES: Final = 32
TOKEN_BYTES: Final = 16
_DIGEST_BYTES: Final = 32
_SIDES: Final = (b"from controller", b"from worker")
_LENGTH = struct.Struct("<I")
_MOST_BYTES: Final = 1 << 20
"""Of ``send_values``. An invitation has the controller's ``sys.path``."""


class RefusedError(ConnectionError):
    """The other side does not know the secret, or is no asyncpipe."""


async def let_in(connected: socket.socket, secret: bytes) -> tuple[Secured, bytes]:
    """The controller's side: the connection, and the token of the worker at its other end.

    Raises ``RefusedError``, or another ``OSError`` where the connection breaks.
    """
    challenge = os.urandom(CHALLENGE_BYTES)
    await _send(connected, GREETING + challenge)
    answer = await _receive(connected, TOKEN_BYTES + CHALLENGE_BYTES + _DIGEST_BYTES)
    token, others = answer[:TOKEN_BYTES], answer[TOKEN_BYTES:-_DIGEST_BYTES]
    if not hmac.compare_digest(answer[-_DIGEST_BYTES:], _digest(secret, b"worker", challenge, others, token)):
        raise RefusedError("it does not know the secret")
    await _send(connected, _digest(secret, b"controller", challenge, others, token))
    return _secured(connected, secret, _SIDES, challenge, others, token), token


async def introduce(connected: socket.socket, secret: bytes, token: bytes) -> Secured:
    """The worker's side: show that this is the worker of ``token``, and check the controller. Raises as ``let_in``."""
    greeting = await _receive(connected, len(GREETING))
    if greeting != GREETING:
        raise RefusedError(f"this is no controller of asyncpipe: it says {greeting!r}")
    challenge, own = await _receive(connected, CHALLENGE_BYTES), os.urandom(CHALLENGE_BYTES)
    await _send(connected, token + own + _digest(secret, b"worker", challenge, own, token))
    answer = await _receive(connected, _DIGEST_BYTES)
    if not hmac.compare_digest(answer, _digest(secret, b"controller", challenge, own, token)):
        raise RefusedError("the controller does not know the secret")
    return _secured(connected, secret, _SIDES[::-1], challenge, own, token)


def secret_for(secret: bytes, purpose: str) -> bytes:
    """Another secret that follows from ``secret``, and does not tell it."""
    return _digest(secret, b"secret", purpose.encode())


async def send_values(connected: Secured, values: Mapping[str, Any]) -> None:
    """Send a table of JSON's types to who has shown that it knows the secret."""
    data = json.dumps(values).encode()
    pieces = [_LENGTH.pack(len(data)), data]
    await _send(connected.socket, b"".join(pieces if connected.macs is None else connected.macs.sealed(pieces)))


async def receive_values(connected: Secured) -> dict[str, Any]:
    """What ``send_values`` has sent, and not a byte more. Raises ``ValueError`` if it is nothing of the kind."""
    (length,) = _LENGTH.unpack(await _receive_piece(connected, _LENGTH.size))
    if length > _MOST_BYTES:
        raise ValueError(f"a greeting of {length} bytes")
    values = json.loads((await _receive_piece(connected, length)).decode())
    if not isinstance(values, dict):
        raise ValueError("a greeting that is no table")
    return values


def _secured(connected: socket.socket, secret: bytes, sides: Iterable[bytes], *shown: bytes) -> Secured:
    """``sides`` are this one and the other one, ``shown`` is what both have shown."""
    keys = [_digest(secret, side, *shown) for side in sides]
    return Secured(connected, None if connected.family == socket.AF_UNIX else Macs(*keys))


def _digest(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"|".join([GREETING, *parts]), "sha256")


async def _send(connected: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connected, data)


async def _receive_piece(connected: Secured, size: int) -> bytes:
    piece = await _receive(connected.socket, size)
    if connected.macs is not None:
        connected.macs.check(piece, await _receive(connected.socket, MAC_BYTES))
    return piece


async def _receive(connected: socket.socket, size: int) -> bytes:
    received = bytearray(size)
    view = memoryview(received)
    while view:
        if not (count := await asyncio.get_running_loop().sock_recv_into(connected, view)):
            raise ConnectionResetError("the connection was closed")
        view = view[count:]
    return bytes(received)
