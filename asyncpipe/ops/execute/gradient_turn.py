"""Whose turn it is to make a pipeline's gradients: one step's, or one pass of the autograd engine's.

A pass is one run of the engine: all that one ``loss.backward()`` or ``autograd.grad`` does. The stages of a pipeline
add to the ``grad`` of parameters, so two passes at once would mix theirs. A turn lasts until its pass is over, because
the engine itself adds to ``grad`` behind the pipeline's last node. All calls of a pipeline in one pass share a turn.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from asyncpipe.errors import BackwardError

__all__ = ["GradientTurn"]

SIGNAL_SECONDS = 0.25
"""How often a thread that waits wakes, so that the main thread can run a signal handler."""


class _Waits:
    """Of all turns together: threads that wait for turns of several pipelines may wait for each other."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.awaited: dict[int, GradientTurn] = {}
        """By thread: the turn that it waits for."""


_waits_of: dict[int, _Waits] = {}
"""By process: a thread of the parent, which a forked child does not have, may hold the parent's lock."""


def _waits() -> _Waits:
    return _waits_of.get(os.getpid()) or _waits_of.setdefault(os.getpid(), _Waits())


class GradientTurn:
    """The turns of one pipeline. ``owner`` is a step or the number of a pass; each of its calls is a ``member``."""

    def __init__(self) -> None:
        self._owner: object = None
        self._members: set[object] = set()
        self.threads: set[int] = set()
        """The threads that the owner has called from."""

    def take_at_once(self, owner: object, member: object) -> bool:
        """Take or join the turn; false if it is another owner's. Never blocks."""
        with _waits().changed:
            if self._members and self._owner != owner:
                return False
            self._join(owner, member)
            return True

    def take(self, owner: object, member: object) -> bool:
        """Wait for the turn, then take or join it; whether it is that of an owner around this one, on this thread.

        Raises ``BackwardError`` if that owner waits, over other pipelines, for this thread.
        """
        mine, waits = threading.get_ident(), _waits()
        with waits.changed:
            while self._members and self._owner != owner and mine not in self.threads:
                if mine in self._needed(waits.awaited):
                    raise BackwardError(
                        "backwards on two threads wait for each other: each goes through a pipeline that the other one "
                        "has begun; run them on one thread, or in one loss"
                    )
                waits.awaited[mine] = self
                try:
                    waits.changed.wait(SIGNAL_SECONDS)
                finally:
                    del waits.awaited[mine]
            is_inside = bool(self._members) and self._owner != owner
            self._join(owner, member)
            return is_inside

    def leave(self, member: object) -> None:
        """End the part of ``member``; may be called again. The turn is over with the last one."""
        with (changed := _waits().changed):
            self._members.discard(member)
            if not self._members:
                self._owner = None
                self.threads.clear()
                changed.notify_all()

    def _join(self, owner: object, member: object) -> None:
        self._owner = owner
        self._members.add(member)
        self.threads.add(threading.get_ident())

    def _needed(self, awaited: Mapping[int, GradientTurn]) -> set[int]:
        """The threads that must go on before this turn can end, over all turns that they wait for."""
        needed: set[int] = set()
        turns = [self]
        for turn in turns:
            new = turn.threads - needed
            needed |= new
            turns += [awaited[thread] for thread in new if thread in awaited]
        return needed
