"""The life of a driver: opened once, on the caller's loop or on one in a thread of its own, and closed once.

However it ends, no thread is left: one that is dropped without being closed, or that the interpreter's exit
overtakes, lets its threads end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncpipe.errors import PipelineClosedError
from asyncpipe.runtime.driver import Driver
from asyncpipe.runtime.portal import Portal

__all__ = ["Lifespan"]

_T = TypeVar("_T")


class Lifespan:
    """Opens and closes ``driver``. Whoever drops this object without closing it ends the driver's threads."""

    def __init__(self, driver: Driver, of: str) -> None:
        """``of`` says in errors what it is the life of."""
        self.portal: Portal | None = None
        """The loop's thread, if the loop is the driver's own."""
        self._driver = driver
        self._of = of
        self._finalizer: weakref.finalize[..., Lifespan] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has been opened and not closed since."""
        return self._finalizer is not None and self._finalizer.alive

    def check(self) -> None:
        """Raise ``PipelineClosedError`` unless it is open."""
        if not self.is_open:
            state = "not open; use 'async with'" if self._finalizer is None else "closed"
            raise PipelineClosedError(f"the {self._of} is {state}")

    def open(self) -> None:
        """Start the threads; on the thread of the loop that will drive the steps."""
        if self._finalizer is not None:
            raise PipelineClosedError(f"a {self._of} opens once; make a new one")
        self._driver.open()
        # Called when it is closed, or dropped without being closed, or when the interpreter exits.
        self._finalizer = weakref.finalize(self, _end_threads, self._driver, self.portal)

    def open_in_thread(self) -> None:
        """Start the threads, and a loop in one more thread that will drive the steps."""
        if self._finalizer is None:
            self.portal = Portal()
            try:
                self.portal.call(_call(self.open))
            except BaseException:
                self.portal.close()
                raise
        else:
            self.open()

    async def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run ``coroutine`` on the driver's loop; from a coroutine of any loop."""
        return await (self.portal.run(coroutine) if self.portal is not None else coroutine)

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run ``coroutine`` on the driver's loop, which is in a thread, and block until it is done."""
        assert self.portal is not None
        return self.portal.call(coroutine)

    def close(self) -> None:
        """End the threads; no step is under way. Blocks for a moment. May be called again."""
        if self.is_open:
            assert self._finalizer is not None
            self._finalizer()
            self._driver.join()
            if self.portal is not None:
                self.portal.join()


def _end_threads(driver: Driver, portal: Portal | None) -> None:
    driver.close()
    if portal is not None:
        portal.close()


async def _call(function: Callable[[], None]) -> None:
    function()
