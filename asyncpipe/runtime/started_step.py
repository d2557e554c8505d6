"""A step that was begun and is not awaited yet, so that its caller can prepare and begin the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from asyncpipe.errors import PipelineClosedError
from asyncpipe.runtime.portal import Portal, PortalCall, wait_uncancelled
from asyncpipe.runtime.under_way import Drives, UnderWay

__all__ = ["Line", "StartedHere", "StartedInThread", "StartedStep"]


_Step = TypeVar("_Step", bound=UnderWay)


class Line(Generic[_Step]):
    """Steps that follow each other: the last one that has begun. Used on the driver's loop."""

    def __init__(self) -> None:
        self.last: _Step | None = None

    def start(self, begin: Callable[[_Step | None], _Step]) -> _Step:
        """Begin one more behind the last one."""
        self.last = begin(self.last)
        return self.last


_Told = TypeVar("_Told", bound=UnderWay, covariant=True)


class StartedStep(Protocol[_Told]):
    """One step. Steps of a line are cancelled from the last to the first: none may begin behind one that has not."""

    async def issued(self) -> _Told:
        """Wait as ``Driver.issued``, without cancelling the step if the caller is cancelled."""

    def wait(self) -> _Told:
        """As ``issued``, blocking; a signal handler (Ctrl-C) may raise here."""

    def cancel(self) -> None:
        """Abort it, unless it is over."""

    async def ended(self) -> None:
        """Wait until no thread uses it any more, even if the caller is cancelled. Raises nothing."""

    def wait_ended(self) -> None:
        """As ``ended``, blocking."""

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call ``call`` when it has ended, on any thread."""


class StartedHere(Generic[_Step]):
    """A step on the caller's own loop."""

    def __init__(self, driver: Drives[_Step], line: Line[_Step], begin: Callable[[_Step | None], _Step]) -> None:
        """``begin`` begins a step behind another one, on the driver's loop."""
        self._driver = driver
        self._execution: _Step | None = None
        try:
            self._execution = line.start(begin)
        except PipelineClosedError as error:
            # Perhaps the step before has just failed: its error is to be told first.
            self._refused = error

    async def issued(self) -> _Step:
        if self._execution is None:
            raise self._refused
        self._execution.raise_for(await asyncio.shield(self._execution.issued))
        return self._execution

    def wait(self) -> _Step:
        raise AssertionError("a thread cannot block for its own loop")

    def cancel(self) -> None:
        if self._execution is not None:
            self._driver.cancel(self._execution)

    async def ended(self) -> None:
        if self._execution is not None:
            await wait_uncancelled(self._execution.done)

    def wait_ended(self) -> None:
        raise AssertionError("a thread cannot block for its own loop")

    def when_ended(self, call: Callable[[], None]) -> None:
        if self._execution is None:
            call()
        else:
            self._execution.done.add_done_callback(lambda _: call())


class StartedInThread(Generic[_Step]):
    """A step on the portal's loop."""

    def __init__(
        self, driver: Drives[_Step], portal: Portal, line: Line[_Step], begin: Callable[[_Step | None], _Step]
    ) -> None:
        """``begin`` begins a step behind another one, on the driver's loop."""
        self._call: PortalCall[_Step] = portal.submit(_start(driver, line, begin))

    async def issued(self) -> _Step:
        return await asyncio.shield(self._awaitable())

    def wait(self) -> _Step:
        return self._call.wait()

    def cancel(self) -> None:
        if not self._call.future.done():
            self._call.cancel()

    async def ended(self) -> None:
        await wait_uncancelled(self._awaitable())

    def _awaitable(self) -> asyncio.Future[_Step]:
        future = asyncio.wrap_future(self._call.future)
        future.add_done_callback(_retrieve)  # Whoever waits may be cancelled; asyncio would say that nobody cared.
        return future

    def wait_ended(self) -> None:
        self._call.end()

    def when_ended(self, call: Callable[[], None]) -> None:
        self._call.future.add_done_callback(lambda _: call())


def _retrieve(future: asyncio.Future[_Step]) -> None:
    if not future.cancelled():
        future.exception()


async def _start(driver: Drives[_Step], line: Line[_Step], begin: Callable[[_Step | None], _Step]) -> _Step:
    return await driver.issued(line.start(begin))
