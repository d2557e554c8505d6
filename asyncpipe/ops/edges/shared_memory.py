"""The transport between two processes of one host: memory that both of them map. Of a GPU, where both have one.

Between a CPU and another each message is copied once: the sender copies its tensors into a place of the edge's memory
(``asyncpipe/shared_memory.py``), the receiver gets tensors that are views of it. When the last of them is gone, the
place is told to be free, and is used again.

Where both workers have one GPU, its own memory is shared (``cuda_memory.py``), if the two ends find, by a message that
they try while the edge is made, that this works. Otherwise, and towards a worker without a GPU, tensors pass through
the memory of the host, which an end with a GPU pins, once for each time that it grows. Nothing on such an end copies
into or out of memory that is not pinned, and no thread of a device takes part::

    sender's stream    waits for ``ready``, copy ─▶ place ─▶ event
    sender's thread                                           waits for it │ header
                                                                           ▼
    receiver's stream                                                    place ─▶ copy ─▶ ``ready`` ─▶ on_message
                                                                                    ┊
    lane                                         its stream waits for the receiver's ``ready``, then computes
    receiver's thread  sees that the event of its copy has happened: the place goes back with a credit

The header says that the tensors are there, as everywhere: the sender's thread waits once, for computing and copying.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from asyncpipe.ops.device.streams import AcceleratorStream, record
from asyncpipe.ops.edges.cuda_calls import PinnedMap
from asyncpipe.ops.edges.cuda_memory import CudaMemoryIn, CudaMemoryOut
from asyncpipe.ops.edges.message import EdgeHeader, EdgeMessage, MessageLayout, TensorLayout
from asyncpipe.ops.edges.pair_store import PairStore
from asyncpipe.ops.edges.payload import (
    PayloadIn,
    PayloadOut,
    Reading,
    await_ready,
    empty,
    queue_in,
    queue_out,
    write_to,
)
from asyncpipe.shared_memory import ALIGNMENT, Place, SharedPool, SharedViews, new_memory

__all__ = ["HostMemory", "SharedMemory", "SharedMemoryIn", "SharedMemoryOut"]

_logger = logging.getLogger(__name__)

INLINE_BYTES = 1 << 12
DIRECT_BYTES = 1 << 18
"""To copy more takes longer than to hand over to another thread."""
_PROBE = list(range(256))
"""What a receiver must find in the memory of a GPU."""
_PROBE_LAYOUT = MessageLayout(b"", (TensorLayout(torch.uint8, (len(_PROBE),), None),))


class HostMemory:
    """The transport by the memory of the host alone."""

    shares_devices = False
    """Whether GPUs share theirs where they can."""

    def __init__(self, device: torch.device) -> None:
        """``device`` is this worker's. Messages arrive there."""
        self._device = None if device.type == "cpu" else device

    def sender(self, store: PairStore) -> PayloadOut:
        descriptor = new_memory("asyncpipe-edge")
        try:
            store.channel.send_descriptor(descriptor)
            return self._shared_out(store) or SharedMemoryOut(descriptor, self._device)
        finally:
            os.close(descriptor)

    def receiver(self, store: PairStore) -> PayloadIn:
        descriptor = store.channel.receive_descriptor(store.deadline)
        try:
            return self._shared_in(store) or SharedMemoryIn(descriptor, self._device)
        finally:
            os.close(descriptor)

    def _both_may(self, store: PairStore, me: str, peer: str) -> bool:
        """Whether both ends have a GPU, and may share its memory."""
        may = self._device is not None and self.shares_devices
        store.set(me, b"%d" % may)
        return store.get(peer) == b"1" and may

    def _shared_out(self, store: PairStore) -> PayloadOut | None:
        """The sender's side by the memory of a GPU, if the receiver has read there what it should have."""
        if not self._both_may(store, "sender", "receiver") or self._device is None:
            return None
        shared = CudaMemoryOut(self._device)
        with _failure_told():
            shared.place(_PROBE_LAYOUT, EdgeMessage(EdgeHeader(0, 0, 0, 0), [torch.tensor(_PROBE, dtype=torch.uint8)]))
        store.set("probe", shared.news)
        shared.news = b""
        if store.get("found") == b"1":
            shared.returned([1])
            return shared
        shared.close()
        return None

    def _shared_in(self, store: PairStore) -> PayloadIn | None:
        if not self._both_may(store, "receiver", "sender") or self._device is None:
            return None
        shared, found = CudaMemoryIn(self._device), None
        if news := store.get("probe"):
            with _failure_told():
                shared.learn(1, news)
                found = shared.read(_PROBE_LAYOUT, 1)
        store.set("found", b"%d" % (found == _PROBE))
        if found == _PROBE:
            return shared
        shared.close()
        return None


class SharedMemory(HostMemory):
    """The transport by whatever memory both ends can share."""

    shares_devices = True


@contextmanager
def _failure_told() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, AttributeError) as error:  # Of CUDA, and of a torch that cannot share memory of GPUs.
        _logger.warning("two workers share no memory of a GPU, so tensors pass through that of the host: %s", error)


class SharedMemoryOut(PayloadOut):
    """The sender's side. A slot says where its place begins."""

    inline_bytes = INLINE_BYTES
    direct_bytes = DIRECT_BYTES

    def __init__(self, descriptor: int, device: torch.device | None = None) -> None:
        """``descriptor`` of memory of no size, which stays the caller's; ``device``: pinned, for copies from there."""
        self._stream = None if device is None else AcceleratorStream(device)
        if self._stream is not None:
            self.inline_bytes = 0  # These would be copied into memory that is not pinned.
        self._pool = SharedPool(descriptor, mmap.mmap if device is None else PinnedMap)
        self._places: dict[int, Place] = {}
        """Those that are in use, by slot."""

    def place(self, layout: MessageLayout, message: EdgeMessage) -> int:
        if (stream := self._stream) is None:
            await_ready(message)
        place, memory = self._pool.allocate(layout.offsets[-1])
        if stream is not None:
            queue_in(stream, layout, message, torch.frombuffer(memory, dtype=torch.uint8))
            # Hazard: the receiver must not read before the copies are over, nor may what they read be used again.
            record(stream.stream).synchronize()
        else:
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            for each, tensor, offset in zip(layout.tensors, message.tensors, layout.offsets, strict=False):
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
    """The receiver's side. Tensors on the host keep their memory alive, also after ``close``."""

    receives_at_once = True

    def __init__(self, descriptor: int, device: torch.device | None = None) -> None:
        """``descriptor`` of the sender's memory, which stays the caller's; ``device``: where tensors arrive."""
        self._stream = None if device is None else AcceleratorStream(device)
        self._views = SharedViews(descriptor, mmap.mmap if device is None else PinnedMap)
        self._reading = Reading[memoryview]()

    def receive(self, layout: MessageLayout, slot: int) -> tuple[list[Tensor | None], torch.Event | None]:
        # Each tensor refers to this object. There is a new one for each message, so its end is the end of all of them.
        lease = self._views.view(Place((slot - 1) * ALIGNMENT, layout.offsets[-1]))
        if self._stream is not None:
            on_device, ready = queue_out(self._stream, layout, torch.frombuffer(lease, dtype=torch.uint8))
            # Hazard: the sender writes to a place that is free. It must be kept until the copies out of it are over.
            self._reading.begin(ready, lease)
            return on_device, ready
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
        self._reading.over()
        return [place.start // ALIGNMENT + 1 for place in self._views.freed()]

    def close(self) -> None:
        self._reading.wait()  # Hazard: memory is unpinned and unmapped when nobody has it.
        self._views.close()
