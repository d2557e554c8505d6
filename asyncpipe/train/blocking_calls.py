"""Blocking calls that do not block the event loop: in the loop's thread pool, or in a run's dedicated thread.

A workload's own code (its entry, its measurements, its batches) may take minutes or wait for a network. It runs in the
run's ``DedicatedThread``: in the pool, which all runs of a process share, it would delay the updates and snapshots of
the others. A coroutine that waits for a call is cancelled only after the call has returned, so no call is left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar

from asyncpipe.ops.device.caller_streams import current_streams
from asyncpipe.runtime.portal import wait_uncancelled

__all__ = ["DedicatedThread", "call_for_future", "in_thread", "wait_to_end"]

_T = TypeVar("_T")


async def in_thread(function: Callable[[], _T]) -> _T:
    """``call_for_future(function)`` in a thread of the loop's pool; a cancellation is raised only after it returned.

    The thread has the current streams of the caller: what it queues on a device is in order with what the caller does.
    """
    call = partial(_call_on, current_streams(), function)
    return await wait_to_end(asyncio.get_running_loop().run_in_executor(None, call_for_future, call))


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


def _call_on(streams: Callable[[], AbstractContextManager[None]], function: Callable[[], _T]) -> _T:
    with streams():
        return function()


async def wait_to_end(future: asyncio.Future[_T]) -> _T:
    """The result of ``future``; a cancellation does not reach it, and is raised only when it is done."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await wait_uncancelled(future)
        future.exception()  # Marks the exception as retrieved; the caller gets the cancellation instead.
        raise


class DedicatedThread:
    """One thread that makes calls in the order in which they are submitted, each by ``call_for_future``.

    An async context manager; leaving it waits for all calls.
    """

    def __init__(self, name: str, streams: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Calls are made inside ``streams()``, a caller's streams."""
        self._streams = streams
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def __aenter__(self) -> DedicatedThread:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            # The last call of the queue: after it, shutting the executor down does not block the loop.
            await self.run(lambda: None)
        finally:
            self._executor.shutdown()

    def submit(self, function: Callable[[], _T]) -> Future[_T]:
        """Queue a call; any thread may wait for the result."""
        return self._executor.submit(call_for_future, partial(_call_on, self._streams, function))

    def begin(self, function: Callable[[], _T]) -> asyncio.Future[_T]:
        """Queue a call; the loop may wait for the result, or ignore it."""
        call = partial(_call_on, self._streams, function)
        future = asyncio.get_running_loop().run_in_executor(self._executor, call_for_future, call)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    async def run(self, function: Callable[[], _T]) -> _T:
        """Make a call and wait for its result; a cancellation is raised only after it returned."""
        return await wait_to_end(self.begin(function))
