"""The watchdog: fails a step whose task hangs, so that no caller waits for it for ever.

A task can hang where Python cannot interrupt it: in a deadlock between threads, a read from a dead disk, a kernel that
never ends. The watchdog compares the time of each running task with the mean of earlier steps, at regular intervals::

    running ──▶ longer than the floor, and than factor × its mean time ──▶ hung
                                                                            │
      on a thread of this process: all stacks are logged, the device gets a new thread, HungTaskError
      in a worker: the worker is killed, WorkerLostError                    │
                                                                            ▼
                                      the step fails ──▶ others continue; this one needs a new model, from a snapshot

A thread cannot be killed and may still write to the old model. A worker can; it takes the stages of all pipelines that
live in it along. One that is stopped, or whose threads cannot run since one of them holds the GIL, answers no pings
during a step, and is killed after the floor, whatever it runs.

In workers a step can also stand still while nothing runs: a message is lost, or nobody takes it. After the floor, all
workers are asked what they are at. Who is at the root of the waits is killed. Where it is the link between two that
answer, nobody is, and the step fails with ``HangError``. Errors of hangs name the root (``core/hangs/roots.py``).
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from asyncpipe.errors import OptionError

__all__ = ["Suspect", "Watched", "Watchdog"]

_logger = logging.getLogger(__name__)

FIRST_FLOORS = 10.0
"""A task that has not run before may take this many floors: first tasks compile kernels and fill caches."""
LATE_PAUSES = 4.0
"""If a check comes after this many pauses, the loop was blocked or the process was stopped."""
CHECKS_PER_FLOOR = 4
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 5.0
"""Bounds of the seconds between two checks."""


class Suspect(NamedTuple):
    """Something that runs, and should end: a task, a worker that is to answer, or a step."""

    started: float
    """When it began, in seconds of ``time.perf_counter``."""
    expected: float | None
    """The seconds that it usually takes; ``None`` if that is not known."""
    give_up: Callable[[float, Callable[[str], object]], None]
    """Ends its step, since it has run for so many seconds; at once, or when it is clear what hangs.

    The other argument is then called with what to log, on any thread; not if it has just ended by itself.
    """
    thread: int | None = None
    """The identifier of the thread that runs it, if that is one of this process."""


class Watched(Protocol):
    """``Driver``, to be watched on its loop, or ``PartsDriver``, from any thread."""

    def suspects(self) -> Sequence[Suspect]:
        """What runs now."""


class Watchdog:
    """Watches the tasks of one driver, inside ``async with``."""

    def __init__(
        self,
        driver: Watched,
        *,
        factor: float = 20.0,
        floor: float = 60.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """A task counts as hung after ``factor`` times its mean time, and not before ``floor`` seconds.

        ``clock`` must be the executors' clock. ``sleep`` waits until the next check.
        """
        if not (factor >= 1 and floor > 0):
            raise OptionError(f"factor must be at least 1 and floor more than 0 seconds, got {factor!r} and {floor!r}")
        self._driver = driver
        self._factor = factor
        self._floor = floor
        self._clock = clock
        self._sleep = sleep
        self._pause = min(max(floor / CHECKS_PER_FLOOR, SHORTEST_PAUSE), LONGEST_PAUSE)
        self._checked_at = -math.inf
        self._resumed_at = -math.inf
        """When checks resumed after a break in which tasks may not have run either. Their time counts from here."""
        self._watching: asyncio.Task[None] | None = None
        self.hung = 0
        """How many hangs it has found, and ended."""

    async def __aenter__(self) -> Watchdog:
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name="asyncpipe watchdog")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    async def _watch(self) -> None:
        while True:
            await self._sleep(self._pause)
            try:
                self.check()
            except Exception:
                _logger.exception("the watchdog failed, which is a bug in asyncpipe; it tries again")

    def check(self) -> None:
        """Give up the tasks that hang now."""
        now = self._clock()
        # A process that was stopped for a minute must not lose all its running steps.
        if now - self._checked_at > LATE_PAUSES * self._pause and self._checked_at > -math.inf:
            self._resumed_at = now
        self._checked_at = now
        for suspect in self._driver.suspects():
            if now - max(suspect.started, self._resumed_at) > self._limit(suspect.expected):
                stacks = "" if suspect.thread is None else "\n" + _stacks(suspect.thread)
                suspect.give_up(now - suspect.started, partial(self._found, stacks))

    def _limit(self, expected: float | None) -> float:
        return self._floor * FIRST_FLOORS if expected is None else max(self._floor, self._factor * expected)

    def _found(self, stacks: str, text: str) -> None:
        self.hung += 1
        _logger.error("%s%s", text, stacks)


def _stacks(first: int) -> str:
    """The stacks of all threads, that of the thread with the identifier ``first`` first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != first)
    return "\n".join(
        f"{'hung thread, ' if ident == first else ''}{names.get(ident, ident)}:\n"
        + "".join(traceback.format_stack(frame))
        for ident, frame in frames
    )
