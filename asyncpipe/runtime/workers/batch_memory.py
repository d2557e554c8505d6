"""Memory that a controller shares with one of its workers, for mini-batches: they are copied once, and pass no socket.

::

    controller  BatchMemory.put ──▶ places ── StartPart ──▶ BatchViews.views   worker
                BatchMemory.free ◀──────────── PartEnded ── BatchViews.freed ◀── the last tensor of a place is gone

The memory is a file without a name, whose descriptor the launcher hands down. It grows to what is in use at a time.
"""

from __future__ import annotations

import mmap
import os
import pickle
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

__all__ = ["BatchMemory", "BatchViews", "Place"]

SMALLEST = 1 << 14
"""Bytes. To send less costs no more than to find a place for it."""
ALIGNMENT = 64


class Place(NamedTuple):
    """Where a buffer is."""

    start: int
    size: int
    number: int
    """Of all that were ever taken."""


class BatchMemory:
    """The controller's side, for any thread."""

    def __init__(self, descriptor: int) -> None:
        """Keeps a duplicate of ``descriptor``, a file of no bytes."""
        self._descriptor = os.dup(descriptor)
        self._lock = threading.Lock()
        """Of what follows."""
        self._memory: mmap.mmap | None = None
        self.size = 0
        """Bytes."""
        self._used: list[Place] = []
        """Sorted."""
        self._numbers = count()

    def put(self, buffers: Sequence[pickle.PickleBuffer]) -> list[pickle.PickleBuffer | Place]:
        """``buffers``, with the places of copies instead of the large ones, unless there is no memory for these."""
        found: list[pickle.PickleBuffer | Place] = []
        for buffer in buffers:
            with buffer.raw() as raw, self._lock:
                place = self._place(raw.nbytes) if raw.nbytes >= SMALLEST else None
                if place is not None and self._memory is not None:
                    self._memory[place.start : place.start + place.size] = raw
            found.append(buffer if place is None else place)
        return found

    def free(self, places: Iterable[Place]) -> None:
        """The worker does not use these, or not any more."""
        with self._lock:
            for place in places:
                if place in self._used:
                    self._used.remove(place)

    def close(self) -> None:
        """The worker is gone. May be called again."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
                self._memory = None

    def _place(self, size: int) -> Place | None:
        start = 0
        for used in self._used:
            if used.start - start >= size:
                break
            start = -(-(used.start + used.size) // ALIGNMENT) * ALIGNMENT
        if not self._reaches(start + size):
            return None
        insort(self._used, place := Place(start, size, next(self._numbers)))
        return place

    def _reaches(self, size: int) -> bool:
        if size > self.size and self._descriptor >= 0:
            grown = -(-2 * size // mmap.PAGESIZE) * mmap.PAGESIZE
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self._descriptor, 0, grown)  # Memory that is short is a signal later.
                else:
                    os.ftruncate(self._descriptor, grown)
                self._memory = mmap.mmap(self._descriptor, grown)
            except OSError:
                return False
            self.size = grown
        return size <= self.size and self._memory is not None


class BatchViews:
    """The worker's side. Used on one thread."""

    def __init__(self, descriptor: int) -> None:
        """As ``BatchMemory``."""
        self._descriptor = os.dup(descriptor)
        self._memory = memoryview(b"")
        self._freed: deque[Place] = deque()
        """Appended to wherever the last tensor of a place goes, the collector included: nothing there may lock."""
        self._leases: dict[Place, weakref.ref[memoryview]] = {}

    def views(self, buffers: Sequence[object]) -> list[object]:
        """``buffers``, with views of the memory for places. A place is free when nothing refers to its view."""
        return [self._view(each) if isinstance(each, Place) else each for each in buffers]

    def freed(self) -> list[Place]:
        """Places that are free again; each once."""
        found = [self._freed.popleft() for _ in range(len(self._freed))]
        for place in found:
            del self._leases[place]
        return found

    def close(self) -> None:
        """Let go of the memory; views keep theirs."""
        os.close(self._descriptor)
        self._memory = memoryview(b"")

    def _view(self, place: Place) -> memoryview:
        end = place.start + place.size
        if end > len(self._memory):
            self._memory = memoryview(mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size))
        view, freed = self._memory[place.start : end], self._freed
        self._leases[place] = weakref.ref(view, lambda _: freed.append(place))
        return view
