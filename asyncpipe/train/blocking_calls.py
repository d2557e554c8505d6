"""Blocking calls that do not block the event loop: in the loop's thread pool, or in a run's dedicated thread.

A workload's own code (its entry, its measurements, its batches) may take minutes or wait for a network. It runs in the
run's ``DedicatedThread``: in the pool, which all runs of a process share, it would delay the updates and snapshots of
the others. A coroutine that waits for a call is cancelled only after the call has returned, so no call is left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TypeVar

from asyncpipe.runtime.waiting import outlast

__all__ = ["DedicatedThread", "call_for_future", "in_thread", "wait_to_end"]

_T = TypeVar("_T")


async def in_thread(function: Callable[[], _T]) -> _T:
    """``contained(function)``, in a thread of the loop's pool; a cancellation is raised only when it has ended."""
    return await wait_to_end(asyncio.get_running_loop().run_in_executor(None, call_for_future, function))


def call_for_future(function: Callable[[], _T]) -> _T:
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


async def wait_to_end(future: asyncio.Future[_T]) -> _T:
    """What ``future`` comes to, however long that takes: a cancellation is raised only when it is done."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await outlast(future)
        future.exception()  # Retrieved: the cancellation is what the caller learns.
        raise


class DedicatedThread:
    """One thread that does what it is given in that order, as an async context manager, whose end waits for it.

    What it is given is ``call_for_future``.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def __aenter__(self) -> DedicatedThread:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            # The last in the line: when this is done, closing the thread does not block the loop.
            await self.run(lambda: None)
        finally:
            self._executor.shutdown()

    def submit(self, function: Callable[[], _T]) -> Future[_T]:
        """Have ``function`` called; any thread may wait for the result."""
        return self._executor.submit(call_for_future, function)

    def begin(self, function: Callable[[], _T]) -> asyncio.Future[_T]:
        """Have ``function`` called; the loop may wait for the result, and nobody has to."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, call_for_future, function)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    async def run(self, function: Callable[[], _T]) -> _T:
        """Call ``function`` there; a cancellation is raised only when it has ended."""
        return await wait_to_end(self.begin(function))
