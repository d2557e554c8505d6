"""Shows completed steps to observers, none of which can fail or hold up a step.

An observer is called on the scheduler's loop. One that raises is removed. One that is slow once is served from a
thread of its own from then on, so that it cannot delay dispatch a second time::

    step completed ──▶ observer ──▶ quick: stays on the loop
                           │
                           ├──▶ raises ──▶ logged, removed                     trouble: raised
                           │
                           └──▶ slow ────▶ logged, gets a queue and a thread   trouble: slow
                                               └──▶ queue full ──▶ not shown   trouble: dropped

Each is logged in one line, once for an observer (the error with its traceback), and told at once to the observers that
count such troubles.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from threading import Thread

from asyncpipe.core.engine.events import DeviceMemory, FailureCounter, Observer, StepRecord

__all__ = ["Observers"]

_logger = logging.getLogger(__name__)

_FAILED = "observer %r failed and is removed"

SLOW = 0.1
"""Seconds on the loop after which an observer gets a thread of its own."""
MOST_WAITING = 16
"""Records that may wait for such an observer; each holds its whole journal."""
PATIENCE = 5.0
"""Seconds that closing waits for an observer that does not return."""


class Observers:
    """The observers of one pipeline. Used on the driver's loop; ``close`` and ``join`` from any thread."""

    def __init__(
        self, observers: Iterable[Observer] = (), memory: Callable[[], dict[str, DeviceMemory]] = dict
    ) -> None:
        """``memory`` reads the memory of the physical devices."""
        self.shown = list(observers)
        """Who is shown records; the list may be changed at any time."""
        self._memory = memory
        self._aside: dict[int, _Aside] = {}

    def survey(self) -> dict[str, DeviceMemory]:
        """The memory of the physical devices, if there is anybody to show it to."""
        return self._memory() if self.shown else {}

    def show(self, record: StepRecord) -> None:
        """Show ``record`` to everyone. What an ``Exception`` ends here is the observer."""
        for observer in tuple(self.shown):
            aside = self._aside.get(id(observer))
            if aside is None:
                self._show_here(observer, record)
            elif not aside.offer(record):
                self._tell("dropped")
        for aside in [aside for aside in self._aside.values() if not self._is_shown(aside.observer)]:
            del self._aside[id(aside.observer)]
            aside.close()

    def close(self) -> None:
        """Let the threads end when they have shown what waits. May be called again."""
        for aside in tuple(self._aside.values()):
            aside.close()

    def join(self) -> None:
        """Wait for the threads, after ``close``; not for ever for an observer that does not return."""
        for aside in tuple(self._aside.values()):
            aside.join()

    def _show_here(self, observer: Observer, record: StepRecord) -> None:
        before = time.perf_counter()
        try:
            observer.step_completed(record)
        except Exception:
            _logger.exception(_FAILED, observer)
            self.remove(observer)
            return
        seconds = time.perf_counter() - before
        if seconds > SLOW:
            _logger.warning("observer %r held up the loop for %.3g s; from now on it has a thread", observer, seconds)
            self._tell("slow")
            self._aside[id(observer)] = _Aside(observer, self)

    def remove(self, observer: Observer) -> None:
        """Show nothing any more to ``observer``, which raised. From any thread."""
        # By identity: an observer may compare equal to others.
        self.shown[:] = [other for other in self.shown if other is not observer]
        self._tell("raised")

    def _tell(self, reason: str) -> None:
        """Let the observers that count troubles count this one."""
        for observer in tuple(self.shown):
            if isinstance(observer, FailureCounter):
                try:
                    observer.observer_failed(reason)
                except Exception:
                    _logger.exception("observer %r cannot count that one %s", observer, reason)

    def _is_shown(self, observer: Observer) -> bool:
        return any(other is observer for other in self.shown)


class _Aside:
    """A slow observer, its queue and its thread. Offered records on the loop."""

    def __init__(self, observer: Observer, owner: Observers) -> None:
        self.observer = observer
        self._queue: SimpleQueue[StepRecord | None] = SimpleQueue()
        self._complained = False
        self._thread = Thread(
            target=_serve, args=(self._queue, observer, owner), name="asyncpipe observer", daemon=True
        )
        self._thread.start()

    def offer(self, record: StepRecord) -> bool:
        """Queue ``record``, unless too many wait."""
        if self._queue.qsize() < MOST_WAITING:
            self._queue.put(record)
            return True
        if not self._complained:
            self._complained = True
            _logger.warning("observer %r is too slow for its steps; some are not shown to it", self.observer)
        return False

    def close(self) -> None:
        self._queue.put(None)

    def join(self) -> None:
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            _logger.warning("observer %r has not returned for %g s; its thread is left behind", self.observer, PATIENCE)


def _serve(queue: SimpleQueue[StepRecord | None], observer: Observer, owner: Observers) -> None:
    """The life of a slow observer's thread. No method of ``_Aside``: one that is dropped can be collected."""
    while (record := queue.get()) is not None:
        try:
            observer.step_completed(record)
        except Exception:
            _logger.exception(_FAILED, observer)
            owner.remove(observer)
            return
        # An idle thread must not keep the last step alive.
        del record
