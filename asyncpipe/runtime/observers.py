"""Calls observers with the records of completed steps. No observer can fail or delay a step.

An observer is called on the driver's loop. One that raises is removed. One that is slow once is called on a thread of
its own from then on, so that it cannot delay dispatch a second time::

    step completed ──▶ observer ──▶ quick: stays on the loop
                           │
                           ├──▶ raises ──▶ logged, removed                          reason: raised
                           │
                           └──▶ slow ────▶ logged, gets a queue and a thread        reason: slow
                                               └──▶ queue full ──▶ record dropped   reason: dropped

Each failure is logged in one line, once per observer (an error with its traceback). Observers that are a
``FailureCounter`` are told the reason at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from threading import Thread

from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.core.records.step_record import FailureCounter, Observer, StepRecord
from asyncpipe.core.records.worker_notes import WorkerChange, WorkerWatcher

__all__ = ["Observers"]

_logger = logging.getLogger(__name__)

SLOW = 0.1
"""Seconds on the loop after which an observer gets a thread of its own."""
MOST_WAITING = 16
"""How many records may wait for such an observer; each holds its whole journal."""
PATIENCE = 5.0
"""How many seconds closing waits for an observer that does not return."""


class Observers:
    """The observers of one pipeline. Used on the driver's loop; ``close`` and ``join`` from any thread."""

    def __init__(
        self, observers: Iterable[Observer] = (), note_devices: Callable[[StepNotes], None] = lambda notes: None
    ) -> None:
        """``note_devices`` notes what the physical devices hold at the end of a step."""
        self.shown = list(observers)
        """The observers that get records. The list may be changed at any time."""
        self._note_devices = note_devices
        self._threads: dict[int, _ObserverThread] = {}

    def note_devices(self, notes: StepNotes) -> None:
        """Add what the physical devices hold to ``notes``, if there is an observer to show them to."""
        if self.shown:
            self._note_devices(notes)

    def show(self, record: StepRecord) -> None:
        """Call every observer with ``record``. An observer that raises an ``Exception`` is removed."""
        for observer in tuple(self.shown):
            thread = self._threads.get(id(observer))
            if thread is None:
                self._show_here(observer, record)
            elif not thread.offer(record):
                self._count("dropped")
        for removed in self._threads.keys() - {id(observer) for observer in self.shown}:
            self._threads.pop(removed).close()

    def worker_changed(self, change: WorkerChange) -> None:
        """Tell the observers that watch workers."""
        for observer in tuple(self.shown):
            if isinstance(observer, WorkerWatcher):
                self.call(observer, "worker_changed", change)

    def close(self) -> None:
        """Let the threads end after the records that are queued. May be called again."""
        for thread in list(self._threads.values()):
            thread.close()

    def join(self) -> None:
        """Wait for the threads, after ``close``; at most ``PATIENCE`` seconds for each."""
        for thread in list(self._threads.values()):
            thread.join()

    def _show_here(self, observer: Observer, record: StepRecord) -> None:
        before = time.perf_counter()
        works = self.call(observer, "step_completed", record)
        seconds = time.perf_counter() - before
        if works and seconds > SLOW:
            _logger.warning("observer %r held up the loop for %.3g s; from now on it has a thread", observer, seconds)
            self._count("slow")
            self._threads[id(observer)] = _ObserverThread(observer, self)

    def call(self, observer: Observer, method: str, told: object) -> bool:
        """Whether ``observer`` has the method and that did not raise; else it is removed. From any thread."""
        try:
            getattr(observer, method)(told)
        except Exception:
            _logger.exception("observer %r failed and is removed", observer)
            # By identity, because an observer may compare equal to others.
            self.shown[:] = [other for other in self.shown if other is not observer]
            self._count("raised")
            return False
        return True

    def _count(self, reason: str) -> None:
        """Tell the observers that count failures of this one."""
        for observer in tuple(self.shown):
            if isinstance(observer, FailureCounter):
                try:
                    observer.observer_failed(reason)
                except Exception:
                    _logger.exception("observer %r failed to count that an observer %s", observer, reason)


class _ObserverThread:
    """A slow observer with its queue and thread. ``offer`` is called on the loop."""

    def __init__(self, observer: Observer, owner: Observers) -> None:
        self.observer = observer
        self._queue: SimpleQueue[StepRecord | None] = SimpleQueue()
        self._warned = False
        self._thread = Thread(
            target=_serve, args=(self._queue, observer, owner), name="asyncpipe observer", daemon=True
        )
        self._thread.start()

    def offer(self, record: StepRecord) -> bool:
        """Queue ``record``; false if too many records wait."""
        if self._queue.qsize() < MOST_WAITING:
            self._queue.put(record)
            return True
        if not self._warned:
            self._warned = True
            _logger.warning("observer %r is too slow; it does not get every record", self.observer)
        return False

    def close(self) -> None:
        self._queue.put(None)

    def join(self) -> None:
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            _logger.warning("observer %r has not returned for %g s; its thread is left behind", self.observer, PATIENCE)


def _serve(queue: SimpleQueue[StepRecord | None], observer: Observer, owner: Observers) -> None:
    """The function of a slow observer's thread. Not a method: it must not keep an ``_ObserverThread`` alive."""
    while (record := queue.get()) is not None:
        if not owner.call(observer, "step_completed", record):
            return
        # An idle thread must not keep the last step alive.
        del record
