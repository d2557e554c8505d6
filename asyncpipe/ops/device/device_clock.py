"""Times of tasks on an accelerator, as seconds of ``time.perf_counter``, which the host's times are in.

Events know only the time between two of them. So each device has a clock: an event on a stream of its own, where
nothing else is ever queued, whose time on the host is known to lie between the call that recorded it and the return of
the wait for it. Of a few tries the one with the shortest round trip wins. All lanes of a device share its clock, so
their times are in one order. Two clocks run apart, by some ten microseconds a second, and ``elapsed_time`` is a
float32: after a second, the next step gets a new event.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import torch

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
    """Converts times of one device. For any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._origin: _Origin | None = None
        self._is_old = False
        self._lock = threading.Lock()

    def tick(self) -> None:
        """A step begins: its tasks are measured from a new event if the last one is old. Does not block."""
        origin = self._origin
        self._is_old = origin is not None and time.perf_counter() - origin.host > LASTS

    def origin(self) -> _Origin:
        """What to measure a task from that begins now. Blocks for a moment if there is no event, or an old one."""
        if self._origin is None or self._is_old:
            with self._lock:
                if self._origin is None or self._is_old:
                    self._origin = self._better(self._origin)
                    self._is_old = False
        assert self._origin is not None
        return self._origin

    def _better(self, old: _Origin | None) -> _Origin:
        if self._stream is None:
            self._stream = lend(self._device, self)
        new = min((self._try() for _ in range(TRIES)), key=lambda origin: origin.error)
        # A round trip that took long (the process did not run, the stream shares a busy hardware queue) tells less than
        # an old event.
        return new if old is None or new.error < old.error + DRIFT * (new.host - old.host) else old

    def _try(self) -> _Origin:
        # Not `blocking`: a thread that sleeps wakes late.
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        before = time.perf_counter()
        event.record(self._stream)
        event.synchronize()
        after = time.perf_counter()
        return _Origin(event, (before + after) / 2, (after - before) / 2)


_clocks: dict[torch.device, DeviceClock] = {}


def clock_of(device: torch.device) -> DeviceClock:
    """The clock of ``device``, which all its streams share."""
    return _clocks.setdefault(device, DeviceClock(device))


class Timing:
    """The time of a task on an accelerator, from when this is made to ``end``. A ``Completion`` for the executor."""

    def __init__(self, stream: Any, clock: DeviceClock) -> None:
        self._stream = stream
        self._origin = clock.origin()
        self._started = self._record()
        self.ended: torch.Event | None = None

    def end(self) -> torch.Event:
        """Record the task's end."""
        self.ended = self._record()
        return self.ended

    def wait(self) -> tuple[float, float]:
        """Block until the device has finished the task; start and end in seconds of ``time.perf_counter``."""
        assert self.ended is not None
        self.ended.synchronize()
        return self._time_of(self._started), self._time_of(self.ended)

    def _record(self) -> torch.Event:
        # `blocking`: a thread that synchronizes sleeps instead of spinning on a core.
        event: torch.Event = torch.get_device_module(self._stream.device).Event(enable_timing=True, blocking=True)
        event.record(self._stream)
        return event

    def _time_of(self, event: torch.Event) -> float:
        return self._origin.host + float(self._origin.event.elapsed_time(event)) * 1e-3
