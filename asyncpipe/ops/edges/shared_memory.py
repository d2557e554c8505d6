"""The transport between two processes of one host: each message is copied once, into memory that both of them map.

The sender copies a message's tensors into a *segment*, the receiver gets tensors that are views of it. When the last of
them is gone, the segment goes back and is used again: mapping new memory costs some thirty times what a copy does. A
segment is an anonymous file whose descriptor travels over the socket. It has no name, so nothing is left of it when
both processes are gone, however they end.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from asyncpipe.ops.edges.channel import Memory
from asyncpipe.ops.edges.message import MessageLayout
from asyncpipe.ops.edges.pair_store import PairStore
from asyncpipe.ops.edges.payload import PayloadIn, PayloadOut, SlotNews, empty, write_to

__all__ = ["SharedMemory", "SharedMemoryIn", "SharedMemoryOut"]

INLINE_BYTES = 1 << 12
DIRECT_BYTES = 1 << 18
"""To copy more takes longer than to hand over to another thread."""
KEPT_BYTES = 64 << 20
"""Free memory that is kept for later messages in any case."""
LOOSE = 2
"""A message takes a free segment that is at most so many times as large."""

_system = ctypes.CDLL(None, use_errno=True)
_system.mmap.restype = ctypes.c_void_p
_system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_system.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class _MappedSegment:
    """A segment as the sender maps it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = _anonymous_file(size)
        try:
            self._memory = _mapped(self.descriptor, size)
        except OSError:
            os.close(self.descriptor)
            raise
        self.address = ctypes.addressof(self._memory)


class SharedMemory:
    """The transport."""

    def __init__(self, device: torch.device, address: str) -> None:
        """``device`` is this worker's; messages arrive on the host, which has both ends of an edge."""

    def sender(self, store: PairStore) -> PayloadOut:
        return SharedMemoryOut()

    def receiver(self, store: PairStore) -> PayloadIn:
        return SharedMemoryIn()

    def close(self) -> None:
        pass


class SharedMemoryOut:
    """The sender's segments. Their memory is at most twice what messages have used at a time, where that is much."""

    inline_bytes = INLINE_BYTES
    direct_bytes = DIRECT_BYTES

    def __init__(self) -> None:
        self._segments: dict[int, _MappedSegment] = {}
        self._free: list[tuple[int, int]] = []
        """Size and slot, sorted."""
        self._free_bytes = self._used_bytes = self._most_used = 0
        self._last = 0
        self._news: list[SlotNews] = []

    def place(self, layout: MessageLayout, tensors: Sequence[Tensor | None]) -> int:
        slot = self._slot(layout.offsets[-1])
        address = self._segments[slot].address
        for each, tensor, offset in zip(layout.tensors, tensors, layout.offsets, strict=False):
            if each is not None and tensor is not None:
                write_to(address + offset, each, tensor)
        return slot

    def _slot(self, size: int) -> int:
        """A free slot of about ``size`` bytes, or a new one."""
        found = bisect_left(self._free, (size, 0))
        if found < len(self._free) and self._free[found][0] <= LOOSE * size:
            size, slot = self._free.pop(found)
            self._free_bytes -= size
        else:
            size = _rounded(size)
            slot = self._new(size)
        self._used_bytes += size
        self._most_used = max(self._most_used, self._used_bytes)
        return slot

    def _new(self, size: int) -> int:
        # What is free has the wrong size. Some of it goes, or messages of ever other sizes would fill the memory.
        while self._free_bytes > max(KEPT_BYTES, self._most_used):
            gone, slot = self._free.pop(0)
            self._free_bytes -= gone
            del self._segments[slot]
            self._news.append(SlotNews(slot, 0, None))
        segment = _MappedSegment(size)
        self._last += 1
        self._segments[self._last] = segment
        self._news.append(SlotNews(self._last, size, segment.descriptor))
        return self._last

    def news(self) -> list[SlotNews]:
        news, self._news = self._news, []
        return news

    def follow(self, layout: MessageLayout, tensors: Sequence[Tensor | None]) -> None:
        pass

    def begun(self) -> int:
        return 0

    def settle(self, begun: int) -> None:
        pass

    def returned(self, slots: Iterable[int]) -> None:
        for slot in slots:
            size = self._segments[slot].size
            insort(self._free, (size, slot))
            self._free_bytes += size
            self._used_bytes -= size

    def abort(self) -> None:
        pass

    def close(self) -> None:
        for news in self.news():
            if news.descriptor is not None:
                os.close(news.descriptor)
        self._segments.clear()
        self._free.clear()


class SharedMemoryIn:
    """The receiver's views of the sender's segments. Tensors keep theirs alive, also after ``close``."""

    takes_at_once = True

    def __init__(self) -> None:
        self._maps: dict[int, memoryview] = {}
        self._leases: dict[int, weakref.ref[memoryview]] = {}
        self._freed: deque[int] = deque()
        """Appended to wherever the last tensor of a slot goes, the collector included: nothing there may lock."""

    def hear(self, news: SlotNews) -> None:
        if news.descriptor is None:
            del self._maps[news.slot]
            return
        try:
            self._maps[news.slot] = memoryview(_mapped(news.descriptor, news.size)).cast("B")[: news.size]
        finally:
            os.close(news.descriptor)

    def take(self, layout: MessageLayout, slot: int) -> tuple[list[Tensor | None], torch.Event | None]:
        # Each tensor refers to this object. There is a new one for each message, so its end is the end of all of them.
        lease = self._maps[slot][: layout.offsets[-1]]
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
        freed = self._freed
        self._leases[slot] = weakref.ref(lease, lambda _: freed.append(slot))
        return tensors, None

    def freed(self) -> list[int]:
        freed = self._freed
        return [freed.popleft() for _ in range(len(freed))]

    def abort(self) -> None:
        pass

    def close(self) -> None:
        self._leases.clear()
        self._maps.clear()


def _anonymous_file(size: int) -> int:
    """A descriptor of ``size`` bytes of memory without a name. Raises ``OSError`` if there is not so much."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("asyncpipe-edge", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)  # If memory is short, here is an error, later were a signal.
        else:
            os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _mapped(descriptor: int, size: int) -> ctypes.Array[ctypes.c_char]:
    """The memory of a descriptor, which may be closed; unmapped when the last reference is gone.

    ``mmap.mmap`` would keep a descriptor for each segment, of which a process may have about a thousand.
    """
    address = _system.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"no memory for a segment of {size} bytes: {os.strerror(error)}")
    memory = Memory.from_address(address)
    # Not when the interpreter ends: tensors may still be there.
    weakref.finalize(memory, _system.munmap, address, size).atexit = False
    return memory


def _rounded(size: int) -> int:
    """``size`` in whole pages, rounded up by at most an eighth, so that about equal messages share segments."""
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step
