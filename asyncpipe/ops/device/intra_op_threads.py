"""How many intra-op threads torch uses on the threads that run CPU stages."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

__all__ = ["IntraOpThreads"]


class IntraOpThreads:
    """Sets the number of intra-op threads on each device's thread; other threads keep theirs.

    ``torch.set_num_threads`` applies to the calling thread and to threads that start later. So after every device's
    thread has set its number, ``restore`` sets the old number again.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._before = torch.get_num_threads()
        self._done: list[threading.Event] = []

    def initializer(self) -> Callable[[], None]:
        """A function that one device's thread calls before anything else."""
        done = threading.Event()
        self._done.append(done)

        def set_threads() -> None:
            # A thread takes over the global number when it first asks for it or computes. Ask before setting: otherwise
            # that would happen later, and undo the setting.
            torch.get_num_threads()
            torch.set_num_threads(self._threads)
            if done.is_set():
                # This thread replaces an abandoned one, and ``restore`` was called long ago. Restore the old number for
                # threads that start later, on a new thread: on this one it would replace the number just set.
                restoring = threading.Thread(target=torch.set_num_threads, args=(self._before,))
                restoring.start()
                restoring.join()
            done.set()

        return set_threads

    def restore(self) -> None:
        """Wait until every initializer has run, then restore the old number. The threads must have been started."""
        for done in self._done:
            done.wait()
        torch.set_num_threads(self._before)
