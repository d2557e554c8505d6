"""What is asked of a run while it is under way: to stop, to follow another schedule, to have another share.

::

    a signal, a client ──▶ RunOrders ◀── a run, and what keeps it going: they read it between two steps
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from asyncpipe.core.policies.share import Share
from asyncpipe.errors import OptionError, ScheduleError
from asyncpipe.train.drained_hosts import Watchable

__all__ = ["NoMoreStepsError", "RunOrders"]

_OVER = "the run does no more training steps, so its schedule cannot be changed"


class NoMoreStepsError(ScheduleError):
    """The run has done its last step, so its schedule cannot be changed."""


class RunOrders(Watchable):
    """The orders of one run, through all its attempts and in whatever process it is; used on the run's loop only."""

    def __init__(self, share: Share | None = None) -> None:
        super().__init__()
        self.stopping = False
        """Whether the run is to end after its step, with a last snapshot but without evaluation and sample."""
        self.share = share
        """The run's share of its pool; ``None`` for the pool's own."""
        self._schedules: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._over = False

    def stop(self) -> None:
        """End the run after its step; before the first one, or while it waits for a batch, as soon as that is made."""
        self.stopping = True
        self.announce()

    def change_share(self, share: Share) -> None:
        """Have another share of the pool from the next step on; with stages in workers, from the next run on."""
        self.share = share
        self.announce()

    async def change_schedule(self, name: str) -> None:
        """Follow another schedule from the next step on; returns when the change is made.

        Later snapshots name the new schedule. Raises ``ScheduleError``, and changes nothing, if the schedule is
        unknown, would move stages to other devices or does not support the run's shape; ``NoMoreStepsError`` if no step
        is left. Cancelling the caller withdraws the request, unless the change is already under way.
        """
        if self._over:
            raise NoMoreStepsError(_OVER)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._schedules.append((name, done))
        self.announce()
        await done

    # The run's side

    @property
    def wants_schedule(self) -> bool:
        """Whether another schedule is wanted and not followed yet."""
        return bool(self._schedules)

    async def follow(self, change: Callable[[str], Awaitable[None]]) -> None:
        """Call ``change`` with each schedule that is wanted; between two steps."""
        while self._schedules:
            name, done = self._schedules.popleft()
            if done.done():
                continue
            try:
                await change(name)
            except OptionError as error:
                _resolve(done, error if isinstance(error, ScheduleError) else ScheduleError(str(error)))
            except BaseException:
                _resolve(done, NoMoreStepsError(_OVER))
                raise
            else:
                _resolve(done)

    def close(self) -> None:
        """Refuse other schedules from now on: there are no more steps."""
        self._over = True
        while self._schedules:
            _resolve(self._schedules.popleft()[1], NoMoreStepsError(_OVER))


def _resolve(done: asyncio.Future[None], error: ScheduleError | None = None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
