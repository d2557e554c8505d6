"""Blocking calls, for callers that await and for callers that block; on devices they are in order with the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from asyncpipe.ops.device.caller_streams import current_streams
from asyncpipe.runtime.thread_calls import call_for_future, wait_to_end

__all__ = ["Blocking", "call_on", "in_thread"]

_T = TypeVar("_T")


async def in_thread(function: Callable[[], _T]) -> _T:
    """``call_for_future(function)`` in a thread of the loop's pool; a cancellation is raised only after it returned.

    The thread has the current streams of the caller: what it queues on a device is in order with what the caller does.
    """
    call = partial(call_on, current_streams(), function)
    return await wait_to_end(asyncio.get_running_loop().run_in_executor(None, call_for_future, call))


def call_on(streams: Callable[[], AbstractContextManager[None]], function: Callable[[], _T]) -> _T:
    """What ``function`` returns inside ``streams()``."""
    with streams():
        return function()


@dataclass(frozen=True, slots=True)
class Blocking(Generic[_T]):
    """A call that blocks: in a thread for a coroutine, or on the thread that waits for it."""

    function: Callable[[], _T]

    async def awaited(self) -> _T:
        """What it returns."""
        return await in_thread(self.function)

    def wait(self) -> _T:
        """What it returns."""
        return self.function()
