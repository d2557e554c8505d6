"""Which thread waits for which: a wait that would close a circle is found before it is one.

Stages may call pipelines, so threads wait for each other's stages and gradients in any order::

    thread 1   has A ──wants──▶ B
    thread 2   has B ──wants──▶ A     raises, since thread 1 waits for it
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Protocol

from asyncpipe.errors import NestedWaitError

__all__ = ["NestingLock", "Held", "ThreadWaits", "needed_threads"]

LOOK_SECONDS = 0.05
"""How often a thread that waits for a lock looks whether the wait is in a circle."""


class Held(Protocol):
    """What threads hold and others wait for."""

    @property
    def threads(self) -> set[int]:
        """The threads that must go on before it is free."""


class ThreadWaits:
    """The waits of this process."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.awaited: dict[int, Held] = {}
        """By thread: what it waits for."""

    @classmethod
    def here(cls) -> ThreadWaits:
        """Those of the calling process."""
        return _by_process.get(os.getpid()) or _by_process.setdefault(os.getpid(), cls())


_by_process: dict[int, ThreadWaits] = {}
"""A thread of the parent, which a forked child does not have, may hold the parent's lock."""


def needed_threads(held: Held, awaited: Mapping[int, Held]) -> set[int]:
    """The threads that must go on before ``held`` is free, over all that they wait for."""
    needed: set[int] = set()
    waits = [held]
    for each in waits:
        new = each.threads - needed
        needed |= new
        # Not looked up twice: a thread may end its wait meanwhile.
        waits += [wait for thread in new if (wait := awaited.get(thread)) is not None]
    return needed


class NestingLock:
    """A lock that its thread may take again. Raises ``NestedWaitError`` where a wait for it would never end."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._thread: int | None = None

    @property
    def threads(self) -> set[int]:
        """The thread that has it, if one has."""
        return set() if (thread := self._thread) is None else {thread}

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._wait()
        self._depth += 1
        self._thread = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._thread = None
        self._lock.release()

    def _wait(self) -> None:
        this_thread, awaited = threading.get_ident(), ThreadWaits.here().awaited
        awaited[this_thread] = self
        try:
            while not self._lock.acquire(timeout=LOOK_SECONDS):
                if this_thread in needed_threads(self, awaited):
                    raise NestedWaitError(
                        "two threads run stages that call each other's pipelines, and each waits for the buffers of a "
                        "stage that the other one runs; let one of the two call the other only"
                    )
        finally:
            del awaited[this_thread]
