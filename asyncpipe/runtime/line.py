"""Steps that follow each other: each begins behind the last one, while its caller prepares the next.

The calls of a line are cancelled from the last to the first: no step may begin behind one that never will.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from asyncpipe.runtime.portal import Portal, PortalCall
from asyncpipe.runtime.step_driver import DrivenStep, StepDriver

__all__ = ["Line"]

_Step = TypeVar("_Step", bound=DrivenStep)


class Line(Generic[_Step]):
    """Knows the last step that has begun. Its steps begin on the driver's loop."""

    def __init__(self) -> None:
        self._last: _Step | None = None

    def submit(self, portal: Portal, driver: StepDriver[_Step], begin: Callable[..., _Step]) -> PortalCall[_Step]:
        """Have ``begin(after=...)`` begin a step behind the last one; the call ends when the step is issued.

        From any thread.
        """
        return portal.submit(self._issued(driver, begin))

    async def _issued(self, driver: StepDriver[_Step], begin: Callable[..., _Step]) -> _Step:
        self._last = begin(after=self._last)
        return await driver.issued(self._last)
