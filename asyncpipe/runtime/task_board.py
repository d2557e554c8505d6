"""What runs in a worker, in memory that its controller reads, too: also when the worker is stopped, hangs, or is gone.

::

    worker      a device's thread ──▶ TaskSlot: the task, and since when      two stores before each task, one behind it
    controller  TaskBoard.running ◀── the slots as they are, or as a worker that is lost has left them

The memory is a file without a name, whose descriptor the launcher hands down. So nothing of it is left when both
processes are gone, however they end. Times are those of ``time.perf_counter``, one clock for a host's processes.
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import Final, NamedTuple

from asyncpipe.shared_memory import new_memory

__all__ = ["ShownTask", "TaskBoard", "TaskSlot", "new_board_file"]

_SLOTS: Final = 256
"""For the threads of one worker's devices, and those that wait for what an accelerator has queued."""
_BYTES: Final = 16 * _SLOTS
_STEP_SHIFT: Final = 32
_TASK_MASK: Final = (1 << _STEP_SHIFT) - 1


class ShownTask(NamedTuple):
    """A task that runs in a worker, or ran when the worker ended."""

    step: int
    """The number of its step in the worker."""
    task: int
    started: float


class TaskSlot:
    """What one thread runs. Used on that thread."""

    __slots__ = ("_keys", "_times", "index")

    def __init__(self, index: int, keys: memoryview[int], times: memoryview[float]) -> None:
        self.index = index
        self._keys = keys
        self._times = times

    def show(self, step: int, task: int, started: float) -> None:
        """The task begins."""
        # In this order: who reads it finds the task with its own time.
        self._times[self.index] = started
        self._keys[self.index] = (step + 1) << _STEP_SHIFT | task

    def clear(self) -> None:
        """The task has ended."""
        self._keys[self.index] = 0


class TaskBoard:
    """The slots of one worker. The controller makes it, the worker opens it by the descriptor that it is handed."""

    def __init__(self, descriptor: int) -> None:
        """Maps the memory of ``descriptor``, which may be closed then."""
        self._memory = mmap.mmap(descriptor, _BYTES)
        with memoryview(self._memory) as memory, memory[: 8 * _SLOTS] as keys, memory[8 * _SLOTS :] as times:
            self._keys: memoryview[int] = keys.cast("q")
            self._times: memoryview[float] = times.cast("d")
        self._kept: list[ShownTask] | None = None
        """What it showed when it was closed."""
        self._lock = threading.Lock()
        self._free = list(reversed(range(_SLOTS)))

    def slot(self) -> TaskSlot | None:
        """A slot for one more thread; ``None`` if all are taken. In the worker, on any thread."""
        with self._lock:
            return TaskSlot(self._free.pop(), self._keys, self._times) if self._free else None

    def give_back(self, slot: TaskSlot) -> None:
        """The slot's thread has ended."""
        slot.clear()
        with self._lock:
            self._free.append(slot.index)

    def running(self) -> list[ShownTask]:
        """What runs, the task that began first in front. In the controller, on any thread."""
        with self._lock:
            return self._read() if self._kept is None else self._kept

    def close(self) -> None:
        """Keep what it shows now, and let go of the memory. In the controller; may be called again."""
        with self._lock:
            if self._kept is None:
                self._kept = self._read()
                self._keys.release()
                self._times.release()
                self._memory.close()

    def _read(self) -> list[ShownTask]:
        found = []
        for index, key in enumerate(self._keys.tolist()):
            if key:
                started = self._times[index]
                if self._keys[index] == key:  # Else the task has ended, and perhaps the next one has begun.
                    found.append(ShownTask((key >> _STEP_SHIFT) - 1, key & _TASK_MASK, started))
        return sorted(found, key=lambda shown: shown.started)


def new_board_file() -> int:
    """The descriptor of memory for a board with free slots; the caller closes it. No child inherits it by itself."""
    descriptor = new_memory("asyncpipe-board")
    os.ftruncate(descriptor, _BYTES)
    return descriptor
