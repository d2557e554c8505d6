"""The frames on an edge's socket.

From the sender to the receiver each frame begins with a header of the same size. Its kind says which fields count, and
what follows. Back come credits, each with the slots that are free again.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

__all__ = ["CREDIT_SIZE", "HEADER_SIZE", "INLINE", "STREAMED", "Credit", "Frame", "EdgeFrameKind", "encode_credit"]

INLINE = 0
"""The slot of a message whose tensors follow its header on the socket."""
STREAMED = 2**31
"""The slot of a message whose tensors come by the transport, beside its header; lower ones are places."""

_HEADER = struct.Struct("<BxHIqqqqQ")
_CREDIT = struct.Struct("<BxxxIQ")
HEADER_SIZE = _HEADER.size
CREDIT_SIZE = _CREDIT.size


class EdgeFrameKind(IntEnum):
    LAYOUT = 1
    """``layout`` stands for the layout that follows."""
    MESSAGE = 3
    CREDIT = 4
    BYE = 5
    """The other side closes the edge in order. Nothing follows."""
    VALUE = 6
    """A value of the store of two, while the edge is made: ``layout`` bytes of its name, then the value."""
    MADE = 7
    """This side of the edge is made."""
    NEWS = 8
    """What the receiver must know of ``slot`` follows."""


class Frame(NamedTuple):
    """A header of fixed size."""

    kind: int
    layout: int = 0
    slot: int = 0
    epoch: int = 0
    step: int = 0
    task: int = 0
    source: int = 0
    size: int = 0

    def encode(self) -> bytes:
        return _HEADER.pack(*self)

    @classmethod
    def decode(cls, data: memoryview | bytes) -> Frame:
        return cls._make(_HEADER.unpack_from(data))


class Credit(NamedTuple):
    """The sender may have sent ``limit`` messages in all; ``slots`` numbers of free memory follow."""

    kind: int
    slots: int
    limit: int

    @classmethod
    def decode(cls, data: memoryview | bytes) -> Credit:
        return cls._make(_CREDIT.unpack_from(data))

    def decode_slots(self, data: memoryview | bytes) -> tuple[int, ...]:
        return struct.unpack_from(f"<{self.slots}I", data)

    @property
    def slots_size(self) -> int:
        """Bytes that follow."""
        return 4 * self.slots


def encode_credit(limit: int, slots: Sequence[int], kind: EdgeFrameKind = EdgeFrameKind.CREDIT) -> bytes:
    return struct.pack(f"<BxxxIQ{len(slots)}I", kind, len(slots), limit, *slots)
