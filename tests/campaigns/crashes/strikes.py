"""What happens to a worker inside one of its tasks: it dies, or stops, or hangs.

The model carries a ``Strike`` into the workers. When it arrives there, the worker's binder is told to look out for the
task in question::

    campaign ── Armed(strike), a layer ──▶ worker: unpickled ──▶ Binder.bind watches ──▶ the task: note, strike
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from asyncpipe.core.graph.task import Task
from asyncpipe.ops.execute.binder import Binder

__all__ = ["DEEDS", "HANGS", "HELD", "Armed", "Strike", "Struck"]

HANGS = ("stop", "gil", "hang")
"""Ways to go on for ever."""


def _signal(number: int) -> None:
    os.kill(os.getpid(), number)
    threading.Event().wait()  # Another thread may be the one that takes it, and this one must not go on meanwhile.


HELD = "held"
"""A deed: the task waits until the note is gone, so that something can be done from outside meanwhile."""
DEEDS: dict[str, Callable[[], object]] = {
    "exit": lambda: os._exit(7),
    "segv": lambda: ctypes.string_at(0),
    "kill": lambda: _signal(signal.SIGKILL),
    "stop": lambda: _signal(signal.SIGSTOP),
    "gil": lambda: ctypes.PyDLL(None).sleep(1000),
    "hang": lambda: threading.Event().wait(),
}


@dataclass(frozen=True)
class Strike:
    """Do ``deed`` in the ``count``-th task of ``kind`` on ``device``, in the ``step``-th step. All count from 0."""

    deed: str
    kind: str
    device: str
    step: int
    count: int
    note: Path
    """Where to write when, and in which task."""


@dataclass(frozen=True)
class Struck:
    """When a worker was struck, and in which task; no task, if from outside."""

    at: float
    task: str = ""
    pid: int = 0
    """If from outside."""

    @classmethod
    def read(cls, note: Path) -> Struck:
        at, task = note.read_text().split()
        return cls(float(at), task)


class Armed(nn.Module):
    """A layer that does nothing here, and lets its worker watch for the strike. ``None`` ends the watch."""

    def __init__(self, strike: Strike | None) -> None:
        super().__init__()
        self.strike = strike

    def forward(self, x: Tensor) -> Tensor:
        return x

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _watch.arm(self.strike)


class _Watch:
    """Of one worker."""

    def __init__(self) -> None:
        self._bind: Any = None
        self._strike: Strike | None = None
        self._steps: list[object] = []
        self._count = 0

    def arm(self, strike: Strike | None) -> None:
        self._strike, self._steps, self._count = strike, [], 0
        if self._bind is None:
            self._bind = bind = Binder.bind

            def watched(binder: Binder, task: Task) -> Callable[[], object]:
                work = bind(binder, task)
                strike = self._strike
                if strike is None or (task.kind.value, task.lane.device) != (strike.kind, strike.device):
                    return work

                def struck() -> object:
                    self._look(binder, task, strike)
                    return work()

                return struck

            Binder.bind = watched  # type: ignore[method-assign, assignment]

    def _look(self, binder: Binder, task: Task, strike: Strike) -> None:
        """On the device's thread: one at a time."""
        if binder not in self._steps:
            self._steps.append(binder)
            self._count = 0
        if (len(self._steps) - 1, self._count) == (strike.step, strike.count):
            strike.note.write_text(f"{time.perf_counter()} {task.id}")
            if strike.deed == HELD:
                while strike.note.exists():
                    time.sleep(0.001)
            else:
                DEEDS[strike.deed]()
        self._count += 1


_watch = _Watch()
