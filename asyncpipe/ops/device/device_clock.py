"""Times of tasks on an accelerator, as seconds of ``time.perf_counter``, which the host's times are in.

Events know only the time between two of them. So each device has a clock: an event on a stream of its own, where
nothing else is ever queued, whose time on the host is known to lie between the call that recorded it and the return of
the wait for it. Of a few tries the one with the shortest round trip wins. All lanes of a device share its clock, so
their times are in one order. Two clocks run apart, by some ten microseconds a second, and ``elapsed_time`` is a
float32: after a second, a new event is tried by a thread that waits for the device anyway, and serves the next step.

A task has one event, at its end. When it began is known without one: when the host queued it, or when what it waited
for had ended, whichever was last::

    host      queues A   queues B
    lane 0      [ A ····················]e
    lane 1                               [ B ·····]e     B began with the end of A, for which its stream waited

Only where a stream waits for something that is no task (what the caller has queued) the next task has an event at its
start as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from asyncpipe.ops.device.devices import make_current
from asyncpipe.ops.device.lent_streams import lend

__all__ = ["DeviceClock", "Timing", "clock_of"]

TRIES = 5
"""How often a round trip is tried; takes some 20 µs each."""
LASTS = 1.0
"""Seconds for which an event serves; it is replaced at the border of two steps."""
DRIFT = 5e-5
"""Seconds a second by which a device's clock may run away from the host's."""


class _Origin(NamedTuple):
    """An event, and when it was on the host, give or take ``error`` seconds."""

    event: Any
    host: float
    error: float


class DeviceClock:
    """Converts times of one device. For any thread. Made before the first task, since it waits for a moment."""

    def __init__(self, device: torch.device) -> None:
        self.make_event: Any = torch.get_device_module(device).Event
        self._stream: Any = lend(device, self)
        self._lock = threading.Lock()
        self.origin = self._best()
        """What to measure a task from that begins now."""
        self._next: _Origin | None = None
        self._due = self.origin.host + LASTS

    def tick(self) -> None:
        """A step begins: its tasks are measured from the newest event."""
        if self._next is not None:
            self.origin, self._next = self._next, None

    def refresh(self) -> None:
        """Try a new event if the last one is old. Blocks for a moment then, so not for a thread that issues tasks."""
        if time.perf_counter() >= self._due and self._lock.acquire(blocking=False):
            try:
                old, new = self.origin, self._best()
                # A round trip that took long (the process did not run, the stream shares a busy hardware queue) tells
                # less than an old event.
                if new.error < old.error + DRIFT * (new.host - old.host):
                    self._next = new
                self._due = time.perf_counter() + LASTS
            finally:
                self._lock.release()

    def _best(self) -> _Origin:
        return min((self._try() for _ in range(TRIES)), key=lambda origin: origin.error)

    def _try(self) -> _Origin:
        # Not `blocking`: a thread that sleeps wakes late.
        event = self.make_event(enable_timing=True)
        before = time.perf_counter()
        event.record(self._stream)
        self._stream.synchronize()  # Not the event, whose wait may make a context on another device.
        after = time.perf_counter()
        return _Origin(event, (before + after) / 2, (after - before) / 2)


_clocks: dict[torch.device, DeviceClock] = {}


def clock_of(device: torch.device) -> DeviceClock:
    """The clock of ``device``, which all its streams share."""
    return _clocks.get(device) or _clocks.setdefault(device, DeviceClock(device))


class Timing:
    """The time of a task on an accelerator, from when this is made to ``end``. A ``Completion`` for the executor."""

    __slots__ = ("_after", "_begun", "_clock", "_ended", "_origin", "ended", "stream")

    def __init__(self, stream: Any, clock: DeviceClock, after: Sequence[Timing] | None) -> None:
        """``after``: of the tasks that ``stream`` waits for, the last of each lane; ``None`` if it waits for others."""
        self.stream = stream
        self._clock = clock
        self._origin = clock.origin
        self._after = after or ()
        self._begun: Any = self._record() if after is None else time.perf_counter()
        self.ended: torch.Event
        self._ended: float | None = None

    def end(self) -> torch.Event:
        """Record the task's end."""
        self.ended = self._record()
        return self.ended

    def wait(self) -> tuple[float, float]:
        """Block until the device has finished the task; start and end in seconds of ``time.perf_counter``."""
        make_current(self.stream.device)
        # torch's `synchronize` gives up the interpreter's lock, which may take long to get again, and `query` does not.
        # So a thread that has woken takes all that has ended meanwhile, at once.
        if not self.ended.query():
            self.ended.synchronize()
        ended, begun = self.end_time(), self._begun
        if not isinstance(begun, float):
            begun = self._time_of(begun)
        started = max([begun, *[timing.end_time() for timing in self._after]])
        self._after = ()
        self._clock.refresh()
        return min(started, ended), ended

    def end_time(self) -> float:
        """When it ended; once it has."""
        if self._ended is None:
            self._ended = self._time_of(self.ended)
        return self._ended

    def _record(self) -> torch.Event:
        # `blocking`: a thread that synchronizes sleeps instead of spinning on a core.
        event: torch.Event = self._clock.make_event(enable_timing=True, blocking=True)
        event.record(self.stream)
        return event

    def _time_of(self, event: Any) -> float:
        return self._origin.host + float(self._origin.event.elapsed_time(event)) * 1e-3
