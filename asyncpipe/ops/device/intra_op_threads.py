"""Intra-op threads of the threads that run CPU stages."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

__all__ = ["IntraOpThreads"]


class IntraOpThreads:
    """Sets the number of intra-op threads on each device's thread and leaves it as it was everywhere else.

    ``torch.set_num_threads`` applies to the calling thread, but also to threads that start later. So ``restore``
    sets the old number again when every device's thread has set its own.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._before = torch.get_num_threads()
        self._done: list[threading.Event] = []

    def initializer(self) -> Callable[[], None]:
        """A function for one device's thread to call first."""
        done = threading.Event()
        self._done.append(done)

        def set_threads() -> None:
            # A thread takes over the global number when it first asks or computes; it must have done so before.
            torch.get_num_threads()
            torch.set_num_threads(self._threads)
            if done.is_set():
                # This thread replaces one that was given up: nobody calls restore() again.
                restoring = threading.Thread(target=torch.set_num_threads, args=(self._before,))
                restoring.start()
                restoring.join()
            done.set()

        return set_threads

    def restore(self) -> None:
        """Wait until every initializer has run (the threads must have been started), and restore the old number."""
        for done in self._done:
            done.wait()
        torch.set_num_threads(self._before)
