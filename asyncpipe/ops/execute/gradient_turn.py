"""Whose turn it is to make a pipeline's gradients: one step's, or one pass of the autograd engine's.

A pass is one run of the engine: all that one ``loss.backward()`` or ``autograd.grad`` does. The stages of a pipeline
add to the ``grad`` of parameters, so two passes at once would mix theirs. A turn lasts until its pass is over, because
the engine itself adds to ``grad`` behind the pipeline's last node. All calls of a pipeline in one pass share a turn.
"""

from __future__ import annotations

import threading
from typing import NoReturn

from asyncpipe.errors import BackwardError
from asyncpipe.ops.device.thread_waits import ThreadWaits, needed_threads

__all__ = ["GradientTurn", "refuse_inside_task"]

SIGNAL_SECONDS = 0.25
"""How often a thread that waits wakes, so that the main thread can run a signal handler."""


class GradientTurn:
    """The turns of one pipeline. ``owner`` is a step or the number of a pass; each of its calls is a ``member``."""

    def __init__(self) -> None:
        self._owner: object = None
        self._members: set[object] = set()
        self.threads: set[int] = set()
        """The threads that the owner has called from."""
        self._in_lanes = False
        """Whether the owner waits for lanes, and not inside a task, which runs everything itself."""

    def try_acquire(self, owner: object, member: object, *, inside_task: bool = False) -> bool:
        """Take or join the turn; false if it is another owner's. Never blocks."""
        with ThreadWaits.here().changed:
            if self._members and self._owner != owner:
                return False
            self._join(owner, member, inside_task)
            return True

    def acquire(self, owner: object, member: object, *, inside_task: bool = False) -> bool:
        """Wait for the turn, then take or join it; whether it is that of an owner around this one, on this thread.

        Raises ``BackwardError`` if that owner waits, over other pipelines, for this thread, or for lanes while this
        thread is ``inside_task``.
        """
        this_thread, waits = threading.get_ident(), ThreadWaits.here()
        with waits.changed:
            while self._members and self._owner != owner and this_thread not in self.threads:
                if this_thread in needed_threads(self, waits.awaited):
                    raise BackwardError(
                        "backwards on two threads wait for each other: each goes through a pipeline that the other one "
                        "has begun; run them on one thread, or in one loss"
                    )
                if inside_task and self._in_lanes:
                    refuse_inside_task()
                waits.awaited[this_thread] = self
                try:
                    waits.changed.wait(SIGNAL_SECONDS)
                finally:
                    del waits.awaited[this_thread]
            is_inside = bool(self._members) and self._owner != owner
            self._join(owner, member, inside_task)
            return is_inside

    def leave(self, member: object) -> None:
        """End the part of ``member``; may be called again. The turn is over with the last one."""
        with (changed := ThreadWaits.here().changed):
            self._members.discard(member)
            if not self._members:
                self._owner = None
                self.threads.clear()
                changed.notify_all()

    def _join(self, owner: object, member: object, inside_task: bool) -> None:
        self._owner = owner
        self._in_lanes = not inside_task or (self._in_lanes and bool(self._members))
        self._members.add(member)
        self.threads.add(threading.get_ident())


def refuse_inside_task() -> NoReturn:
    """Raise ``BackwardError``: a task must not wait for lanes, which may wait for it."""
    raise BackwardError(
        "a task asks for gradients of a pipeline while a step, or a backward outside of tasks, makes these and may "
        "wait for the task; do that backward outside of the step, or freeze the inner pipeline (requires_grad_(False))"
    )
