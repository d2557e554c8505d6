"""What coroutines wait for: calls in threads, what these raise and what a cancellation does, and events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import TypeVar

from asyncpipe.runtime.portal import wait_uncancelled

__all__ = ["call_for_future", "set_within", "wait_to_end"]

_T = TypeVar("_T")


def call_for_future(function: Callable[[], _T]) -> _T:
    """What ``function`` returns; an exception that a future cannot carry is replaced by a ``RuntimeError``.

    ``SystemExit`` and ``KeyboardInterrupt`` would end the event loop, a ``StopIteration`` cannot be set on an asyncio
    future, and a ``CancelledError`` would look like a cancellation of the waiting coroutine.
    """
    # A function of its own, without a reference to the future: the error's traceback keeps this frame alive, and the
    # future will keep the error alive.
    try:
        return function()
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError):
            raise
        raise RuntimeError(f"{error!r} was raised in a thread") from error


async def wait_to_end(future: asyncio.Future[_T]) -> _T:
    """The result of ``future``; a cancellation does not reach it, and is raised only when it is done."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await wait_uncancelled(future)
        future.exception()  # Marks the exception as retrieved; the caller gets the cancellation instead.
        raise


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """Whether ``event`` was set within ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
