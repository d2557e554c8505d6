"""Changes of a run's schedule: asked for at any time, made between two steps."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from asyncpipe.errors import OptionError, ScheduleError

__all__ = ["NoMoreStepsError", "ScheduleChanges"]

_OVER = "the run does no more training steps, so its schedule cannot be changed"


class NoMoreStepsError(ScheduleError):
    """A run is behind its last step, so no schedule can count for it any more."""


class ScheduleChanges:
    """Schedules that were asked for, in that order; everything here is on the run's loop."""

    def __init__(self) -> None:
        self._asked: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._over = False

    async def ask(self, schedule: str) -> None:
        """Returns when the steps follow ``schedule``; raises ``ScheduleError`` where they do not, and never will.

        Whoever is cancelled meanwhile takes it back, unless it is being done.
        """
        if self._over:
            raise NoMoreStepsError(_OVER)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.append((schedule, done))
        await done

    async def make(self, change: Callable[[str], Awaitable[None]]) -> None:
        """Between two steps: call ``change`` with every schedule that was asked for."""
        while self._asked:
            schedule, done = self._asked.popleft()
            if done.done():
                continue
            try:
                await change(schedule)
            except OptionError as error:
                refused = error if isinstance(error, ScheduleError) else ScheduleError(str(error))
                _resolve(done, refused)
            except BaseException:
                _resolve(done, NoMoreStepsError(_OVER))
                raise
            else:
                _resolve(done)

    def close(self) -> None:
        """There will be no more steps."""
        self._over = True
        while self._asked:
            _resolve(self._asked.popleft()[1], NoMoreStepsError(_OVER))


def _resolve(done: asyncio.Future[None], error: ScheduleError | None = None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
