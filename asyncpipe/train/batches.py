"""A run's batches: made one ahead in its dedicated thread, with a position that can be saved and restored.

The next batch is made while a step runs. A snapshot saves the position behind the batch of its step, which is taken
before the next batch is begun::

    loop     next(): 4 ─▶ step 4 begins ─▶ advance() ─▶ … ─▶ step 4 ends ─▶ snapshot ─▶ next(): 5
                                              │                                │
    thread                                    └─▶ position behind 4 ─▶ make 5  └── reads that position

A step draws its number from the run's generator before ``advance``. Batches that draw from that generator too, although
they should not, therefore take turns with the steps, and their position is still right.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Generator

from asyncpipe.errors import AsyncpipeError
from asyncpipe.runtime.thread_calls import wait_to_end
from asyncpipe.train.blocking_calls import DedicatedThread
from asyncpipe.train.job_file import TrainingTable
from asyncpipe.train.randomness import RunRandom
from asyncpipe.train.workload import Batch, Workload

__all__ = ["BatchPrefetcher", "BatchSource", "DataError", "Mark", "data_errors"]

_logger = logging.getLogger(__name__)

Mark = Future[dict[str, Any]]
"""The states of data and random numbers before a batch is made."""


class DataError(AsyncpipeError, RuntimeError):
    """The job's batches could not be made; the original error is the ``__cause__``."""

    def __init__(self, message: str, *, batches: int = 0) -> None:
        super().__init__(message)
        self.batches = batches
        """How many batches were made before."""


@contextmanager
def data_errors(what: str, batches: int) -> Iterator[None]:
    """Turn what the workload's code raises in the block into a ``DataError``: ``what`` failed after so many batches."""
    try:
        yield
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise DataError(f"{what} failed after {batches} batches: {cause}", batches=batches) from error


class BatchSource:
    """The job's batches in order, for one thread at a time; ``taken`` counts them.

    The documentation of ``Workload.batches`` says how a position is restored. Errors of the workload's code become
    ``DataError``.
    """

    def __init__(
        self, workload: Workload, training: TrainingTable, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self.taken = 0
        self._generator = Generator().manual_seed(training.seed)
        with self._data_errors():
            self._source: Any = workload.batches(training.batch_size, self._generator)
        self._iterator: Iterator[Batch] | None = None
        self._memoryless = workload.memoryless
        self._stopping = stopping

    def next(self) -> Batch | None:
        """The next batch; ``None`` after the last one."""
        with self._data_errors():
            if self._iterator is None:
                # Not earlier: a source with a state of its own makes its iterator from the restored state.
                self._iterator = iter(self._source)
            batch: Batch | None = next(self._iterator, None)
        self.taken += batch is not None
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position behind the batch that was taken last; a copy, which later batches do not change."""
        state = {"taken": self.taken, "generator": self._generator.get_state()}
        return {**state, "iterator": deepcopy(self._source.state_dict())} if self._has_state() else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to that position, before the first batch is taken. If it must skip batches, this may block for long."""
        if self._has_state() and "iterator" in state:
            self._source.load_state_dict(state["iterator"])
            with self._data_errors():
                self._iterator = iter(self._source)
        elif not self._memoryless:
            self._skip(state["taken"], state["generator"])
            return
        self._generator.set_state(state["generator"])  # Last, because making an iterator may draw from it.
        self.taken = state["taken"]

    def _data_errors(self) -> AbstractContextManager[None]:
        return data_errors("the job's data", self.taken)

    def _has_state(self) -> bool:
        return hasattr(self._source, "state_dict") and hasattr(self._source, "load_state_dict")

    def _skip(self, batches: int, generator: torch.Tensor) -> None:
        while self.taken < batches and not self._stopping():
            if self.next() is None:
                break
        if not self._stopping() and not torch.equal(self._generator.get_state(), generator):
            _logger.warning(
                "the job's batches differ from those of the snapshot's run (another seed, batch size, data or code, or "
                "random numbers that do not come from the generator): the run goes on behind %d of its own batches",
                self.taken,
            )


class BatchPrefetcher:
    """Hands out batches on the loop while its thread makes the next one."""

    def __init__(self, thread: DedicatedThread, source: BatchSource, random: RunRandom) -> None:
        """``source`` must be used on ``thread`` only, from now on."""
        self._thread = thread
        self._source = source
        self._random = random
        self._ahead: asyncio.Future[Batch | None] | None = None
        self._position: Mark | None = None

    async def next(self) -> Batch | None:
        """The current batch, ``None`` after the last one; the same one until ``advance`` is called.

        Raises ``DataError``. A cancellation is raised only when the batch is made.
        """
        return await wait_to_end(self._ahead or self._begin())

    def advance(self, *, more: bool) -> None:
        """The current batch is used; if ``more`` are wanted, begin to make the next one."""
        self._ahead = self._position = None
        if more:
            self._begin()

    async def settled(self) -> None:
        """Wait until no batch is being made."""
        if self._ahead is not None:
            await asyncio.wait([self._ahead])

    @property
    def mark(self) -> Mark | None:
        """For ``position``: that of the current batch. ``None`` if none was begun."""
        return self._position

    def position(self, mark: Mark | None = None) -> dict[str, Any]:
        """The states of data and random numbers right after the last used batch, or before that of ``mark``.

        Blocks, so not for the loop; not while a step runs.
        """
        mark = mark or self._position
        position = self._current_position() if mark is None else mark.result()
        return {**position, "random": {**position["random"], **self._random.device_state()}}

    def restore(self, position: dict[str, Any]) -> None:
        """Continue from ``position``; on the prefetcher's thread, before the first batch. May block for long."""
        with self._random.drawing():
            self._source.load_state_dict(position["data"])
        self._random.load_state_dict(position["random"])

    def _begin(self) -> asyncio.Future[Batch | None]:
        self._position = self._thread.submit(self._current_position)
        self._ahead = self._thread.begin(self._make)
        return self._ahead

    def _current_position(self) -> dict[str, Any]:
        return {"data": self._source.state_dict(), "random": self._random.state_dict()}

    def _make(self) -> Batch | None:
        with self._random.drawing():
            return self._source.next()
