"""Frames as the ends of connections send them, and what somebody on the path between two hosts makes of them."""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch

from asyncpipe.ops.edges.message import MessageLayout, TensorLayout
from asyncpipe.ops.edges.wire import EdgeFrameKind, Frame, encode_credit
from asyncpipe.secured import MAC_BYTES, Macs, Piece

__all__ = ["MUTATIONS", "Canary", "Changed", "Keys", "bomb", "forged", "mutated", "pair", "sealed"]


class Canary:
    """Leaves a file where it is unpickled."""

    path = Path()

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


def bomb() -> bytes:
    return pickle.dumps(Canary())


class Keys(NamedTuple):
    """Of a connection: what its ends send with."""

    here: bytes
    there: bytes

    @classmethod
    def drawn(cls, chance: Random) -> Keys:
        return cls(chance.randbytes(32), chance.randbytes(32))

    @property
    def ours(self) -> Macs:
        return Macs(self.here, self.there)

    @property
    def theirs(self) -> Macs:
        return Macs(self.there, self.here)


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection by TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        here = socket.create_connection(listening.getsockname())
        return here, listening.accept()[0]


def sealed(frames: Sequence[Sequence[Piece]], macs: Macs) -> list[bytes]:
    """The frames as they are sent, each in one."""
    return [b"".join(macs.sealed(frame)) for frame in frames]


class Changed(NamedTuple):
    """What arrives in the place of what was sent."""

    data: bytes
    good: int
    """So many frames, the first ones, are as they were sent."""


def _flip(chance: Random, frames: list[bytes], k: int) -> None:
    frame = bytearray(frames[k])
    for bit in chance.sample(range(8 * len(frame)), chance.randint(1, 8)):
        frame[bit // 8] ^= 1 << bit % 8
    frames[k] = bytes(frame)


def _cut(chance: Random, frames: list[bytes], k: int) -> None:
    start = chance.randrange(len(frames[k]))
    frames[k] = frames[k][:start] + frames[k][start + chance.randint(1, len(frames[k])) :]


def _grow(chance: Random, frames: list[bytes], k: int) -> None:
    at = chance.randrange(len(frames[k]))
    frames[k] = frames[k][:at] + chance.randbytes(chance.randint(1, 99)) + frames[k][at:]


def _drop(chance: Random, frames: list[bytes], k: int) -> None:
    del frames[k]


def _end(chance: Random, frames: list[bytes], k: int) -> None:
    frames[k:] = [frames[k][: chance.randrange(len(frames[k]))]]


def _replay(chance: Random, frames: list[bytes], k: int) -> None:
    frames.insert(k, frames[chance.randrange(k)] if k else frames[-1])


def _swap(chance: Random, frames: list[bytes], k: int) -> None:
    other = chance.choice([each for each in range(len(frames)) if each != k])
    frames[k], frames[other] = frames[other], frames[k]


_Change = Callable[[Random, list[bytes], int], None]
MUTATIONS: dict[str, _Change | None] = {
    "flipped bits": _flip,
    "cut": _cut,
    "grown": _grow,
    "left out": _drop,
    "ended": _end,
    "replayed": _replay,
    "swapped": _swap,
    "of another connection": None,
    "the receiver's own": None,
    "forged": None,
}


def mutated(
    chance: Random, how: str, frames: Sequence[bytes], others: Sequence[bytes], echoes: Sequence[bytes]
) -> Changed:
    """``frames``, and one of them is changed: by ``how``, one of ``MUTATIONS``.

    ``others`` are the same of another connection, ``echoes`` what the receiver itself has sent.
    """
    found, k = list(frames), chance.randrange(len(frames))
    if (change := MUTATIONS[how]) is not None:
        change(chance, found, k)
    elif how == "forged":
        found.insert(k, forged(chance))
    elif how == "of another connection":
        found[k] = others[k]
    else:
        found.insert(k, chance.choice(echoes))
    data = b"".join(found)
    same = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(data, b"".join(frames), strict=False)))
    ends = accumulate(map(len, frames))
    return Changed(data, sum(end <= same for end in ends))


def forged(chance: Random) -> bytes:
    """A frame of an edge or of a control connection that holds a pickle, by somebody without a key."""
    payload = chance.choice([bomb(), b"more" + bomb(), chance.randbytes(99)])
    layout = MessageLayout(payload, (TensorLayout(torch.float32, (2,), None),)).encode()
    pieces = chance.choice(
        [
            [Frame(EdgeFrameKind.LAYOUT, 0, size=len(layout)).encode(), layout],
            [Frame(EdgeFrameKind.LAYOUT, 0, size=chance.choice([1 << 20, 1 << 40, 1 << 63])).encode()],
            [Frame(EdgeFrameKind.MESSAGE, chance.randrange(3), 0, 0, 7, 9, 0, 8).encode(), bytes(8)],
            [Frame(EdgeFrameKind.MESSAGE, 0, chance.randrange(1 << 32), size=1 << 40).encode()],
            [encode_credit(1 << 40, ()), encode_credit(1, range(9))],
            [Frame(EdgeFrameKind.BYE).encode()],
            _control(payload),
            [payload],
        ]
    )
    mac = chance.choice([b"", bytes(MAC_BYTES), chance.randbytes(MAC_BYTES)])
    return b"".join(piece + mac for piece in pieces)


def _control(payload: bytes) -> list[bytes]:
    begin = struct.pack("!BQQ", 0, 1, len(payload))
    return [struct.pack("!BBI", 0, 1, len(begin)), begin, struct.pack("!BBI", 1, 1, len(payload)), payload]
