"""Where a device's thread waits for its queue, and for what other processes send, which it takes itself.

A thread that receives for another one wakes it for every message: two changes of threads, where one is enough. So a
device's thread that has nothing to do takes what has come by itself::

    queue ──▶ bell ─┐
    descriptor ─────┼─▶ wait ──▶ take() ──▶ what it opens goes to the queue
    descriptor ─────┘

It takes nothing while it runs a task. Who must not wait for that has another thread that looks from time to time.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, runtime_checkable

__all__ = ["Arrivals", "Listens", "Take"]

Take = Callable[[], bool]
"""Takes what has come, and never waits; false if nothing will come any more. Must not raise."""


@runtime_checkable
class Listens(Protocol):
    """An executor whose thread takes what arrives for it while it has nothing to do. On the loop's thread."""

    def listen(self, descriptor: int, take: Take) -> None:
        """Call ``take`` there when there is something to read at ``descriptor``."""

    def ignore(self, descriptor: int, take: Take) -> None:
        """Undo ``listen``, also if the descriptor was closed meanwhile."""


class Arrivals:
    """What one thread waits for; ``wait`` is for that thread, everything else for any. Needs Linux."""

    AVAILABLE = hasattr(os, "eventfd") and hasattr(select, "epoll")
    """Whether this system has what it needs."""

    def __init__(self) -> None:
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.epoll()
        self._poll.register(self._bell, select.EPOLLIN)
        self._takes: dict[int, Take] = {}
        self._is_waiting = False
        self._ringing = threading.Lock()
        self._is_open = True

    def add(self, descriptor: int, take: Take) -> None:
        """Call ``take`` whenever there is something to read at ``descriptor``, until ``discard``."""
        with suppress(OSError):  # It was closed already.
            self._poll.register(descriptor, select.EPOLLIN)
        self._takes[descriptor] = take

    def discard(self, descriptor: int, take: Take) -> None:
        """Undo ``add``; a ``take`` that runs may go on for a moment."""
        # If the descriptor was closed, it may be another one by now.
        if self._takes.get(descriptor) == take:
            del self._takes[descriptor]
            with suppress(OSError):
                self._poll.unregister(descriptor)

    def ring(self) -> None:
        """Let the thread look around, if it is in ``wait``."""
        if self._is_waiting:
            with self._ringing:
                if self._is_open:
                    os.eventfd_write(self._bell, 1)

    def wait(self, is_due: Callable[[], bool]) -> None:
        """Wait until something was taken, or somebody rang, unless ``is_due``: what who rings has done before."""
        self._is_waiting = True
        try:
            happened = [] if is_due() else self._poll.poll()
        finally:
            # What the thread itself puts into its queue needs no bell.
            self._is_waiting = False
        self._take(happened)

    def look(self) -> None:
        """Take what has come."""
        if self._takes:
            self._take(self._poll.poll(0))

    def _take(self, happened: list[tuple[int, int]]) -> None:
        for descriptor, _ in happened:
            if descriptor == self._bell:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
            elif (take := self._takes.get(descriptor)) is not None and not take():
                self.discard(descriptor, take)

    def close(self) -> None:
        """The thread waits no more."""
        with self._ringing:
            self._is_open = False
            self._poll.close()
            os.close(self._bell)
