"""A thread of a run's own, for the code that others wrote: its entry, its measurements, its batches.

Such code may take minutes, or wait for a disk or a network. In the loop's pool of threads, which all runs of a process
share, a few of them would hold up everybody's updates and snapshots; here a run waits for nobody but itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from asyncpipe.train.threads import contained, ended

__all__ = ["OwnThread"]

_T = TypeVar("_T")


class OwnThread:
    """One thread that does what it is given in that order, as an async context manager, whose end waits for it.

    What it is given is ``contained``.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def __aenter__(self) -> OwnThread:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            # The last in the line: when this is done, closing the thread does not block the loop.
            await self.run(lambda: None)
        finally:
            self._executor.shutdown()

    def submit(self, function: Callable[[], _T]) -> Future[_T]:
        """Have ``function`` called; any thread may wait for the result."""
        return self._executor.submit(contained, function)

    def begin(self, function: Callable[[], _T]) -> asyncio.Future[_T]:
        """Have ``function`` called; the loop may wait for the result, and nobody has to."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, contained, function)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    async def run(self, function: Callable[[], _T]) -> _T:
        """Call ``function`` there; a cancellation is raised only when it has ended."""
        return await ended(self.begin(function))
