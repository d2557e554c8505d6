"""Work that would hold up the loop: in a thread of its pool, and never left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import TypeVar

from asyncpipe.runtime.waiting import outlast

__all__ = ["contained", "ended", "in_thread"]

_T = TypeVar("_T")


async def in_thread(function: Callable[[], _T]) -> _T:
    """``contained(function)``, in a thread of the loop's pool; a cancellation is raised only when it has ended."""
    return await ended(asyncio.get_running_loop().run_in_executor(None, contained, function))


def contained(function: Callable[[], _T]) -> _T:
    """What ``function`` returns; what it raises comes as a ``RuntimeError`` where no loop could take it from a thread.

    ``SystemExit`` and its like would end the loop, a ``StopIteration`` never reaches who waits for it, and a
    ``CancelledError`` would tell them that they were cancelled themselves.
    """
    # In a frame without futures: an error holds the frames that it came through, and a future will hold the error.
    try:
        return function()
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError):
            raise
        raise RuntimeError(f"{error!r} was raised in a thread") from error


async def ended(future: asyncio.Future[_T]) -> _T:
    """What ``future`` comes to, however long that takes: a cancellation is raised only when it is done."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await outlast(future)
        future.exception()  # Retrieved: the cancellation is what the caller learns.
        raise
