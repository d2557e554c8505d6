"""What is written once for callers that await and for callers that block: a generator that yields what it waits for.

Two faces drive such a generator::

    drive            await waits.awaited()     a coroutine, of any loop
    drive_blocking   waits.wait()              a thread

Whatever ends the wait early, a cancellation or Ctrl-C, is raised at the ``yield``, as is the error of what was waited
for. So the generator's ``try`` and ``finally`` hold for both faces.
"""

from __future__ import annotations

from collections.abc import Generator
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any, Protocol, TypeVar

__all__ = ["Waiting", "Waits", "drive", "drive_blocking", "has_ended"]

_T = TypeVar("_T")
_Awaited = TypeVar("_Awaited", covariant=True)


class Waits(Protocol[_Awaited]):
    """Something that has a result later."""

    async def awaited(self) -> _Awaited:
        """The result, for a coroutine."""

    def wait(self) -> _Awaited:
        """The result, for a thread; blocks. A signal handler (Ctrl-C) may raise here."""


Waiting = Generator[Waits[Any], Any, _T]
"""What yields each thing that it waits for, is sent its result, and returns a result of its own."""


def has_ended(steps: Generator[Any, Any, Any]) -> bool:
    """Whether an exception comes from the end of ``steps``, and not from what it waits for."""
    return getgeneratorstate(steps) == GEN_CLOSED


async def drive(steps: Waiting[_T]) -> _T:
    """The result of ``steps``, from a coroutine."""
    value: Any = None
    error: BaseException | None = None
    waits: Waits[Any] | None = None
    try:
        while True:
            try:
                waits = steps.send(value) if error is None else steps.throw(error)
                value = error = None
                value = await waits.awaited()
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            except BaseException as caught:
                if has_ended(steps):
                    raise
                error = caught
    finally:
        # The traceback of an exception holds this frame, which must not hold the exception in turn.
        value = error = waits = None


def drive_blocking(steps: Waiting[_T]) -> _T:
    """The result of ``steps``, on a thread that may block."""
    value: Any = None
    error: BaseException | None = None
    waits: Waits[Any] | None = None
    try:
        while True:
            try:
                waits = steps.send(value) if error is None else steps.throw(error)
                value = error = None
                value = waits.wait()
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            except BaseException as caught:
                if has_ended(steps):
                    raise
                error = caught
    finally:
        value = error = waits = None  # as in ``drive``
