"""A step that was begun and is not awaited yet, so that its caller can prepare and begin the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from asyncpipe.errors import PipelineClosedError
from asyncpipe.runtime.driver import Driver
from asyncpipe.runtime.execution import Execution
from asyncpipe.runtime.portal import Portal, PortalCall, wait_uncancelled

__all__ = ["Line", "StartHere", "StartedHere", "StartedInThread", "StartedStep"]


class Line:
    """Steps that follow each other: the last one that has begun. Used on the driver's loop."""

    def __init__(self) -> None:
        self.last: Execution | None = None

    def start(self, begin: StartHere) -> Execution:
        """Begin one more behind the last one."""
        self.last = begin(self.last)
        return self.last


StartHere = Callable[[Execution | None], Execution]
"""Begins a step behind another one, on the driver's loop."""


class StartedStep(Protocol):
    """One step. Steps of a line are cancelled from the last to the first: none may begin behind one that has not."""

    async def issued(self) -> Execution:
        """Wait as ``Driver.issued``, without cancelling the step if the caller is cancelled."""

    def wait(self) -> Execution:
        """As ``issued``, blocking; a signal handler (Ctrl-C) may raise here."""

    def cancel(self) -> None:
        """Abort it, unless it is over."""

    async def ended(self) -> None:
        """Wait until no thread uses it any more, even if the caller is cancelled. Raises nothing."""

    def wait_ended(self) -> None:
        """As ``ended``, blocking."""

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call ``call`` when it has ended, on any thread."""


class StartedHere:
    """A step on the caller's own loop."""

    def __init__(self, driver: Driver, line: Line, begin: StartHere) -> None:
        self._driver = driver
        self._execution: Execution | None = None
        try:
            self._execution = line.start(begin)
        except PipelineClosedError as error:
            # Perhaps the step before has just failed: its error is to be told first.
            self._refused = error

    async def issued(self) -> Execution:
        if self._execution is None:
            raise self._refused
        self._execution.raise_for(await asyncio.shield(self._execution.issued))
        return self._execution

    def wait(self) -> Execution:
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


class StartedInThread:
    """A step on the portal's loop."""

    def __init__(self, driver: Driver, portal: Portal, line: Line, begin: StartHere) -> None:
        self._call: PortalCall[Execution] = portal.submit(_start(driver, line, begin))

    async def issued(self) -> Execution:
        return await asyncio.shield(asyncio.wrap_future(self._call.future))

    def wait(self) -> Execution:
        return self._call.wait()

    def cancel(self) -> None:
        if not self._call.future.done():
            self._call.cancel()

    async def ended(self) -> None:
        future = asyncio.wrap_future(self._call.future)
        await wait_uncancelled(future)
        if not future.cancelled():
            future.exception()  # Marks it as retrieved.

    def wait_ended(self) -> None:
        self._call.end()

    def when_ended(self, call: Callable[[], None]) -> None:
        self._call.future.add_done_callback(lambda _: call())


async def _start(driver: Driver, line: Line, begin: StartHere) -> Execution:
    return await driver.issued(line.start(begin))
