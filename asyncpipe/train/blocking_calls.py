"""Blocking calls that do not block the event loop: in the loop's thread pool, or in a run's dedicated thread.

A workload's own code (its entry, its measurements, its batches) may take minutes or wait for a network. It runs in the
run's ``DedicatedThread``: in the pool, which all runs of a process share, it would delay the updates and snapshots of
the others. A coroutine that waits for a call is cancelled only after the call has returned, so no call is left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from asyncpipe.pipeline.blocking import call_on, in_thread
from asyncpipe.runtime.thread_calls import call_for_future, wait_to_end

__all__ = ["DedicatedThread", "in_thread"]

_T = TypeVar("_T")


class DedicatedThread:
    """One thread that makes calls in the order in which they are submitted, each by ``call_for_future``.

    A call has the context variables of who submits it.

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
        return self._executor.submit(copy_context().run, call_for_future, partial(call_on, self._streams, function))

    def begin(self, function: Callable[[], _T]) -> asyncio.Future[_T]:
        """Queue a call; the loop may wait for the result, or ignore it."""
        call = partial(call_for_future, partial(call_on, self._streams, function))
        future = asyncio.get_running_loop().run_in_executor(self._executor, copy_context().run, call)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    async def run(self, function: Callable[[], _T]) -> _T:
        """Make a call and wait for its result; a cancellation is raised only after it returned."""
        return await wait_to_end(self.begin(function))
