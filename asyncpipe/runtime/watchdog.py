"""The watchdog: ends steps whose task hangs, so that nobody waits for it for ever.

A task hangs in what nobody can interrupt: a deadlock between threads, a read of a dead disk, a kernel that never ends.
The watchdog knows how long each task took so far, and looks now and then::

    at work ──▶ longer than the floor, and than factor × its usual time ──▶ hung
                                                                             │  all stacks go to the log
                                                                             │  the device gets a new thread
                                                                             ▼
                                          HungTaskError ──▶ the step fails ──▶ other jobs go on; this one needs a new
                                                                              model, as the old thread may still write
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable

from asyncpipe.errors import HungTaskError, OptionError
from asyncpipe.runtime.driver import Driver
from asyncpipe.runtime.execution import RunningTask

__all__ = ["Watchdog"]

_logger = logging.getLogger(__name__)

FIRST = 10.0
"""A task that has not run before may take so many floors: the first ones compile kernels and fill caches."""
LATE = 4.0
"""A look that comes after so many pauses was held up: the loop was blocked, or the process stopped."""
LOOKS = 4
"""Within the floor, bounded by ..."""
SHORTEST, LONGEST = 0.05, 5.0
"""... so many seconds between two looks."""


class Watchdog:
    """Watches the tasks of one driver, inside ``async with``, on the driver's loop."""

    def __init__(
        self,
        driver: Driver,
        *,
        factor: float = 20.0,
        floor: float = 60.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """A task hangs after ``factor`` times what it took so far, and not before ``floor`` seconds.

        ``clock`` is the executors'. ``sleep`` waits until the next look.
        """
        if not (factor >= 1 and floor > 0):
            raise OptionError(f"factor must be at least 1 and floor more than 0 seconds, got {factor!r} and {floor!r}")
        self._driver = driver
        self._factor = factor
        self._floor = floor
        self._clock = clock
        self._sleep = sleep
        self._pause = min(max(floor / LOOKS, SHORTEST), LONGEST)
        self._looked = -math.inf
        self._blind = -math.inf
        """Until when nobody watched, nor maybe worked: what ran then counts from there."""
        self._watching: asyncio.Task[None] | None = None
        self.hung = 0
        """How many tasks were given up."""

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
                self.look()
            except Exception:
                _logger.exception("the watchdog could not look, which is a mistake in asyncpipe; it tries again")

    def look(self) -> None:
        """Give up what hangs now; on the driver's loop."""
        now = self._clock()
        # A machine that is frozen for a minute must not lose every step that it was at.
        if now - self._looked > LATE * self._pause and self._looked > -math.inf:
            self._blind = now
        self._looked = now
        for running in self._driver.running():
            if now - max(running.started, self._blind) > self._patience(running.expected):
                self._give_up(running, now - running.started)

    def _patience(self, expected: float | None) -> float:
        return self._floor * FIRST if expected is None else max(self._floor, self._factor * expected)

    def _give_up(self, running: RunningTask, seconds: float) -> None:
        task = running.execution.graph.tasks[running.task]
        stacks = _stacks(running.executor.thread)
        error = HungTaskError(task.id, task.lane.device, seconds, running.expected)
        if running.executor.give_up(running.current, lambda: self._driver.fail(running.execution, running.task, error)):
            self.hung += 1
            _logger.error("%s\n%s", error, stacks)


def _stacks(first: int | None) -> str:
    """The stacks of all threads, that of the one with the identifier ``first`` before the others."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != first)
    return "\n".join(
        f"{'the thread that hangs, ' if ident == first else ''}{names.get(ident, ident)}:\n"
        + "".join(traceback.format_stack(frame))
        for ident, frame in frames
    )
