"""How many intra-op threads torch uses on the threads that run CPU stages."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch

__all__ = ["IntraOpThreads"]

_turns: dict[int, threading.Lock] = {}
"""By process: a thread of the parent, which a forked child does not have, may hold the parent's lock."""


class IntraOpThreads:
    """Sets the number of intra-op threads on each device's thread; other threads keep theirs.

    ``torch.set_num_threads`` applies to the calling thread and to threads that start later. So a device's thread sets
    its number, and then lets another thread set what threads that start later had before, whoever has set that.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._done: list[threading.Event] = []

    def initializer(self) -> Callable[[], None]:
        """A function that one device's thread calls before anything else. One that takes its place calls it again."""
        done = threading.Event()
        self._done.append(done)

        def set_threads() -> None:
            # One after the other, or one would take the number of another one for that of later threads.
            with _turns.setdefault(os.getpid(), threading.Lock()):
                # A new thread takes over the number of later threads when it first asks for it or computes.
                before = torch.get_num_threads()
                torch.set_num_threads(self._threads)
                # On this thread it would replace the number just set.
                restoring = threading.Thread(target=torch.set_num_threads, args=(before,))
                restoring.start()
                restoring.join()
            done.set()

        return set_threads

    def wait(self) -> None:
        """Wait until every initializer has run, so that what the caller sets next stays. All threads have started."""
        for done in self._done:
            done.wait()
