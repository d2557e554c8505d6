"""Steps that follow each other: each begins behind the last one, while its caller prepares the next.

The calls of a line are cancelled from the last to the first: no step may begin behind one that never will.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from asyncpipe.runtime.portal import Portal, PortalCall
from asyncpipe.runtime.under_way import Drives, UnderWay

__all__ = ["Line"]

_Step = TypeVar("_Step", bound=UnderWay)


class Line(Generic[_Step]):
    """Knows the last step that has begun. Its steps begin on the driver's loop."""

    def __init__(self) -> None:
        self._last: _Step | None = None

    def submit(
        self, portal: Portal, driver: Drives[_Step], begin: Callable[[_Step | None], _Step]
    ) -> PortalCall[_Step]:
        """Have ``begin`` begin a step behind the last one, from any thread; the call ends when the step is issued."""
        return portal.submit(self._issued(driver, begin))

    async def _issued(self, driver: Drives[_Step], begin: Callable[[_Step | None], _Step]) -> _Step:
        self._last = begin(self._last)
        return await driver.issued(self._last)
