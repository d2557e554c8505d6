"""While a stage is compiled, no other task of the process runs.

torch's compiler changes what all threads see: while it traces, ``torch.compiler.is_compiling()`` is true everywhere, so
that an optimizer on another thread would compute its corrections in another precision. So a stage that is about to be
compiled waits until the tasks that run have ended, and tasks that would begin meanwhile wait for it::

    device 0   F ─────┤
    device 1        F │ waits ├═══ compiles ═══╡ runs
    device 2   waits ─────────────────────────── F ───

Nothing waits, and nothing is locked, as long as no pipeline of the process compiles. Such waits, and compiling itself,
are no part of what a task takes; who measures tasks, or looks for those that hang, is told of them (``on_hold_up``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["CompileGate", "compile_gate", "hold_up", "on_hold_up"]

PATIENCE = 60.0
"""Seconds that a compilation waits for the tasks that run. One of them may hang, or wait for the thread that waits."""

_listeners: list[Callable[[bool], object]] = []


def on_hold_up(listener: Callable[[bool], object]) -> None:
    """From now on, call ``listener`` on a task's thread with true when it is held up, and then with false."""
    _listeners.append(listener)


def hold_up(is_held: bool) -> None:
    """Tell that the task of this thread is held up from now on, or is not any more."""
    for listener in _listeners:
        listener(is_held)


class CompileGate:
    """Many threads run tasks, or one thread compiles. Both may nest."""

    def __init__(self) -> None:
        self.is_used = False
        """Whether some pipeline of the process compiles: others need not pass."""
        self._changed = threading.Condition()
        self._running: dict[int, int] = {}
        """By thread: how many tasks it runs, one inside the other."""
        self._compiling: int | None = None
        """The thread that compiles."""

    @contextmanager
    def task(self) -> Iterator[None]:
        """Around a task; waits while another thread compiles."""
        this_thread = threading.get_ident()
        with self._changed:
            if self._compiling not in (None, this_thread) and this_thread not in self._running:
                hold_up(True)
                try:
                    self._changed.wait_for(lambda: self._compiling is None)
                finally:
                    hold_up(False)
            self._running[this_thread] = self._running.get(this_thread, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._running[this_thread] -= 1
                if not self._running[this_thread]:
                    del self._running[this_thread]
                    if self._compiling is not None:
                        self._changed.notify_all()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Around a call that compiles: the other threads run no task, or have not ended theirs for ``PATIENCE``."""
        this_thread = threading.get_ident()
        if self._compiling == this_thread:
            yield
            return
        with self._changed:
            own = self._running.pop(this_thread, 0)  # Two that wait for each other's task would never end.
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._compiling is None)
            self._compiling = this_thread
            if own:
                self._running[this_thread] = own
            until = time.monotonic() + PATIENCE
            while self._running.keys() - {this_thread} and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
        try:
            yield
        finally:
            with self._changed:
                self._compiling = None
                self._changed.notify_all()


compile_gate = CompileGate()
"""That of the process."""
