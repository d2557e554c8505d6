"""Memory that two processes of one machine share. What its owner puts there is copied once, and passes no socket.

::

    owner   SharedPool.allocate ──▶ a place, as two numbers ──▶ SharedViews.view   the other process
            SharedPool.free ◀────────────────────────────── SharedViews.freed ◀── the last reference to a view is gone

The memory is a file without a name, whose descriptor the owner hands down or sends. Nothing of it is left when both
processes are gone, however they end. It grows to what is in use at a time. Controllers share such memory with their
workers, for mini-batches, and workers with each other, one for each edge.
"""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import tempfile
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import NamedTuple

__all__ = ["ALIGNMENT", "Place", "SharedPool", "SharedViews", "new_memory"]

SMALLEST = 1 << 14
"""Bytes of a buffer that ``put`` copies. To send less costs no more than to find a place for it."""
ALIGNMENT = 64
"""Bytes. Places begin at multiples of it, as tensors do in the memory of torch's allocator."""


class Place(NamedTuple):
    """Where something is in the memory."""

    start: int
    size: int
    number: int = 0
    """Of all that were ever allocated. A place that is freed twice is not the one that has its memory since."""


def new_memory(name: str) -> int:
    """The descriptor of memory of no size yet, without a name in the file system; ``name`` is for who looks at it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedPool:
    """The owner's side, for any thread."""

    def __init__(self, descriptor: int, mapped: Callable[[int, int], mmap.mmap] = mmap.mmap) -> None:
        """Keeps a duplicate of ``descriptor``, a file of no bytes. ``mapped`` maps so many bytes of one."""
        self._mapped = mapped
        self.descriptor = os.dup(descriptor)
        """-1 when it is closed."""
        self._lock = threading.Lock()
        """Of what follows."""
        self._memory = memoryview(b"")
        self._used: list[Place] = []
        """Sorted."""
        self._numbers = count()

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self._memory)

    def allocate(self, size: int) -> tuple[Place, memoryview]:
        """A place of ``size`` bytes, and its memory here. Raises ``OSError`` if there is none, or it is closed."""
        with self._lock:
            start = 0
            for used in self._used:
                if used.start - start >= size:
                    break
                start = -(-(used.start + used.size) // ALIGNMENT) * ALIGNMENT
            if start + size > len(self._memory):
                self._grow(start + size)
            insort(self._used, place := Place(start, size, next(self._numbers)))
            return place, self._memory[start : start + size]

    def put(self, buffers: Sequence[pickle.PickleBuffer]) -> list[pickle.PickleBuffer | Place]:
        """``buffers``, with the places of copies instead of the large ones, unless there is no memory for these."""
        found: list[pickle.PickleBuffer | Place] = []
        for buffer in buffers:
            with buffer.raw() as raw:
                try:
                    place, memory = self.allocate(raw.nbytes) if raw.nbytes >= SMALLEST else (None, None)
                except OSError:
                    place = memory = None
                if memory is not None:
                    memory[:] = raw
            found.append(buffer if place is None else place)
        return found

    def free(self, places: Iterable[Place]) -> None:
        """The other process does not use these, or not any more."""
        with self._lock:
            for place in places:
                if place in self._used:
                    self._used.remove(place)

    def close(self) -> None:
        """Nobody is to use it any more. May be called again."""
        with self._lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1
            self._memory = memoryview(b"")

    def _grow(self, size: int) -> None:
        if self.descriptor < 0:
            raise OSError(errno.EBADF, "the shared memory is closed")
        grown = -(-2 * size // mmap.PAGESIZE) * mmap.PAGESIZE
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.descriptor, 0, grown)  # If memory is short, here is an error, later were a signal.
        else:
            os.ftruncate(self.descriptor, grown)
        self._memory = memoryview(self._mapped(self.descriptor, grown))


class SharedViews:
    """The other process's side. ``freed`` is for any thread, the rest for one at a time."""

    def __init__(self, descriptor: int, mapped: Callable[[int, int], mmap.mmap] = mmap.mmap) -> None:
        """Keeps a duplicate of ``descriptor``, as ``SharedPool`` does."""
        self._mapped = mapped
        self._descriptor = os.dup(descriptor)
        self._memory = memoryview(b"")
        self._freed: deque[Place] = deque()
        """Appended to wherever the last view of a place goes, the collector included: nothing there may lock."""
        self._leases: dict[Place, weakref.ref[memoryview]] = {}

    def view(self, place: Place) -> memoryview:
        """The memory of a place, which is free when nothing refers to this object any more.

        Raises ``ValueError`` if there is no such place.
        """
        end = place.start + place.size
        if end > len(self._memory):
            size = os.fstat(self._descriptor).st_size
            if end > size:
                raise ValueError(f"{place} is beyond the {size} bytes of shared memory")
            self._memory = memoryview(self._mapped(self._descriptor, size))
        view, freed = self._memory[place.start : end], self._freed
        self._leases[place] = weakref.ref(view, lambda _: freed.append(place))
        return view

    def views(self, buffers: Sequence[object]) -> list[object]:
        """``buffers`` of ``SharedPool.put``, with views for places."""
        return [self.view(each) if isinstance(each, Place) else each for each in buffers]

    def freed(self) -> list[Place]:
        """Places that are free again; each once."""
        found = [self._freed.popleft() for _ in range(len(self._freed))]
        for place in found:
            del self._leases[place]
        return found

    def close(self) -> None:
        """Let go of the memory; views keep theirs. May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._memory = memoryview(b"")
        self._leases.clear()
