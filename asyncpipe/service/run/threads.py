"""Work that would hold up the loop: in a thread of its pool, and never left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from asyncpipe.runtime.waiting import outlast

__all__ = ["ended", "in_thread"]

_T = TypeVar("_T")


async def in_thread(function: Callable[[], _T]) -> _T:
    """Run ``function`` in a thread of the loop's pool; a cancellation is raised only when it has ended."""
    return await ended(asyncio.get_running_loop().run_in_executor(None, function))


async def ended(future: asyncio.Future[_T]) -> _T:
    """What ``future`` comes to, however long that takes: a cancellation is raised only when it is done."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await outlast(future)
        future.exception()  # Retrieved: the cancellation is what the caller learns.
        raise
