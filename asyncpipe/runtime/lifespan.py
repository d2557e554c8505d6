"""The lifespan of a driver: opened once, on the running loop or on one in a thread of its own, and closed once.

No thread is left, whichever way it ends: closed, garbage collected without being closed, or at the interpreter's exit.
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
    """Opens and closes ``driver``. The driver's threads end when this object is dropped without being closed."""

    def __init__(self, driver: Driver, name: str) -> None:
        """``name`` is what error messages call the thing that is opened and closed."""
        self.portal: Portal | None = None
        """The thread of the driver's loop, if the driver has a loop of its own."""
        self._driver = driver
        self._name = name
        self._finalizer: weakref.finalize[..., Lifespan] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has been opened and not closed since."""
        return self._finalizer is not None and self._finalizer.alive

    def check(self) -> None:
        """Raise ``PipelineClosedError`` unless it is open."""
        if not self.is_open:
            state = "not open; use 'async with'" if self._finalizer is None else "closed"
            raise PipelineClosedError(f"the {self._name} is {state}")

    def open(self) -> None:
        """Start the threads. Called on the thread of the loop that will drive the steps."""
        if self._finalizer is not None:
            raise PipelineClosedError(f"a {self._name} opens once; make a new one")
        self._driver.open()
        # Runs when this is closed, or garbage collected without being closed, or when the interpreter exits.
        self._finalizer = weakref.finalize(self, _end_threads, self._driver, self.portal)

    def open_in_thread(self) -> None:
        """Start the threads, and one more thread with a loop that will drive the steps."""
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
        """Run ``coroutine`` on the driver's loop, from a coroutine of any loop."""
        return await (self.portal.run(coroutine) if self.portal is not None else coroutine)

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run ``coroutine`` on the driver's loop, which is in a thread, and block until it has ended."""
        assert self.portal is not None
        return self.portal.call(coroutine)

    def close(self) -> None:
        """End the threads, when no step is under way. Blocks for a moment. May be called again."""
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
