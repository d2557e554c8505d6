"""The transport between two processes of one host: each message is copied once, into memory that both of them map.

The sender copies a message's tensors into a place of the edge's memory (``asyncpipe/shared_memory.py``), the receiver
gets tensors that are views of it. When the last of them is gone, the place is told to be free, and is used again.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from asyncpipe.ops.edges.message import MessageLayout
from asyncpipe.ops.edges.pair_store import PairStore
from asyncpipe.ops.edges.payload import PayloadIn, PayloadOut, empty, write_to
from asyncpipe.shared_memory import ALIGNMENT, Place, SharedPool, SharedViews, new_memory

__all__ = ["SharedMemory", "SharedMemoryIn", "SharedMemoryOut"]

INLINE_BYTES = 1 << 12
DIRECT_BYTES = 1 << 18
"""To copy more takes longer than to hand over to another thread."""


class SharedMemory:
    """The transport."""

    def __init__(self, device: torch.device) -> None:
        """``device`` is this worker's; messages arrive on the host, which has both ends of an edge."""

    def sender(self, store: PairStore) -> PayloadOut:
        descriptor = new_memory("asyncpipe-edge")
        try:
            store.channel.send_descriptor(descriptor)
            return SharedMemoryOut(descriptor)
        finally:
            os.close(descriptor)

    def receiver(self, store: PairStore) -> PayloadIn:
        descriptor = store.channel.receive_descriptor(store.deadline)
        try:
            return SharedMemoryIn(descriptor)
        finally:
            os.close(descriptor)


class SharedMemoryOut(PayloadOut):
    """The sender's side. A slot says where its place begins."""

    inline_bytes = INLINE_BYTES
    direct_bytes = DIRECT_BYTES

    def __init__(self, descriptor: int) -> None:
        """``descriptor`` of memory of no size, which stays the caller's."""
        self._pool = SharedPool(descriptor)
        self._places: dict[int, Place] = {}
        """Those that are in use, by slot."""

    def place(self, layout: MessageLayout, tensors: Sequence[Tensor | None]) -> int:
        place, memory = self._pool.allocate(layout.offsets[-1])
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for each, tensor, offset in zip(layout.tensors, tensors, layout.offsets, strict=False):
            if each is not None and tensor is not None:
                write_to(address + offset, each, tensor)
        slot = place.start // ALIGNMENT + 1  # 0 is ``INLINE``.
        self._places[slot] = place
        return slot

    def returned(self, slots: Iterable[int]) -> None:
        self._pool.free([self._places.pop(slot) for slot in slots])

    def close(self) -> None:
        self._pool.close()


class SharedMemoryIn(PayloadIn):
    """The receiver's side. Tensors keep their memory alive, also after ``close``."""

    receives_at_once = True

    def __init__(self, descriptor: int) -> None:
        """``descriptor`` of the sender's memory, which stays the caller's."""
        self._views = SharedViews(descriptor)

    def receive(self, layout: MessageLayout, slot: int) -> tuple[list[Tensor | None], torch.Event | None]:
        # Each tensor refers to this object. There is a new one for each message, so its end is the end of all of them.
        lease = self._views.view(Place((slot - 1) * ALIGNMENT, layout.offsets[-1]))
        tensors: list[Tensor | None] = []
        for each, offset, size in zip(layout.tensors, layout.offsets, layout.sizes, strict=False):
            if each is None:
                tensors.append(None)
                continue
            if not size:
                tensors.append(empty(each))
                continue
            # Tensors with memory and a version of their own, and no views of one: a write into one of them is none into
            # the others, for autograd too.
            tensor = torch.frombuffer(lease, dtype=each.dtype, count=size // each.dtype.itemsize, offset=offset)
            tensor = tensor.resize_(each.shape) if each.stride is None else tensor.as_strided_(each.shape, each.stride)
            tensors.append(tensor)
        return tensors, None

    def freed(self) -> list[int]:
        return [place.start // ALIGNMENT + 1 for place in self._views.freed()]

    def close(self) -> None:
        self._views.close()
