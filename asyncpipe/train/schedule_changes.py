"""Changes of a run's schedule: requested at any time, made between two steps."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from asyncpipe.errors import OptionError, ScheduleError

__all__ = ["NoMoreStepsError", "ScheduleChanges"]

_OVER = "the run does no more training steps, so its schedule cannot be changed"


class NoMoreStepsError(ScheduleError):
    """The run has done its last step, so its schedule cannot be changed."""


class ScheduleChanges:
    """The queue of requested schedules; used on the run's loop only."""

    def __init__(self) -> None:
        self._requests: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._over = False

    @property
    def wanted(self) -> bool:
        """Whether a change is requested and not made yet."""
        return bool(self._requests)

    async def ask(self, schedule: str) -> None:
        """Request a change; returns when it is made. Raises ``ScheduleError`` if it cannot be made.

        Cancelling the caller withdraws the request, unless the change is already under way.
        """
        if self._over:
            raise NoMoreStepsError(_OVER)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests.append((schedule, done))
        await done

    async def make(self, change: Callable[[str], Awaitable[None]]) -> None:
        """Call ``change`` with each requested schedule; called between two steps."""
        while self._requests:
            schedule, done = self._requests.popleft()
            if done.done():
                continue
            try:
                await change(schedule)
            except OptionError as error:
                _resolve(done, error if isinstance(error, ScheduleError) else ScheduleError(str(error)))
            except BaseException:
                _resolve(done, NoMoreStepsError(_OVER))
                raise
            else:
                _resolve(done)

    def close(self) -> None:
        """Refuse all requests from now on: there are no more steps."""
        self._over = True
        while self._requests:
            _resolve(self._requests.popleft()[1], NoMoreStepsError(_OVER))


def _resolve(done: asyncio.Future[None], error: ScheduleError | None = None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
