"""A run's batches: made in its own thread, one ahead, with a place in them that can be saved and gone back to.

The next batch is made while a step runs. What a snapshot keeps is the place behind the step's own batch, taken before
the next one is begun::

    loop     next(): 4 ─▶ step 4 begins ─▶ move_on() ─▶ … ─▶ step 4 ends ─▶ snapshot ─▶ next(): 5
                                              │                                │
    thread                                    └─▶ place behind 4 ─▶ make 5     └── reads that place

A step draws its number before ``move_on``, so batches that draw from the generator of the steps, against the rule,
take turns with them and find their place, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from copy import deepcopy
from typing import Any

import torch
from torch import Generator

from asyncpipe.errors import AsyncpipeError
from asyncpipe.train.blocking_calls import DedicatedThread, wait_to_end
from asyncpipe.train.job_file import TrainingTable
from asyncpipe.train.randomness import RunRandom
from asyncpipe.train.workload import Batch, Workload

__all__ = ["BatchPrefetcher", "BatchSource", "DataError", "Place"]

_logger = logging.getLogger(__name__)

Place = dict[str, Any]


class DataError(AsyncpipeError, RuntimeError):
    """The job's batches could not be made; what they raised is the ``__cause__``."""

    def __init__(self, message: str, *, batches: int = 0) -> None:
        super().__init__(message)
        self.batches = batches
        """How many were made before."""

    @classmethod
    def of(cls, what: str, batches: int, cause: Exception) -> DataError:
        """``what`` failed after so many batches."""
        return cls(f"{what} failed after {batches} batches: {type(cause).__name__}: {cause}", batches=batches)


class BatchSource:
    """The job's batches one after the other; ``taken`` is how many there were.

    Not for two threads at once. What ``Workload.batches`` says is the rule by which the place is found again. What the
    workload's own code raises becomes a ``DataError``.
    """

    def __init__(
        self, workload: Workload, training: TrainingTable, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self.taken = 0
        self._generator = Generator().manual_seed(training.seed)
        self._source = self._guarded(lambda: workload.batches(training.batch_size, self._generator))
        self._iterator: Iterator[Batch] | None = None
        self._memoryless = workload.memoryless
        self._stopping = stopping

    def next(self) -> Batch | None:
        """The next batch; ``None`` behind the last one."""
        batch: Batch | None = self._guarded(self._next)
        self.taken += batch is not None
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The place behind the batch that was taken last; shares nothing with what is to come."""
        state = {"taken": self.taken, "generator": self._generator.get_state()}
        return {**state, "iterator": deepcopy(self._source.state_dict())} if self._has_state() else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to that place, from the first batch; skips all before it where there is no other way. May block long."""
        if self._has_state() and "iterator" in state:
            self._source.load_state_dict(state["iterator"])
            self._iterator = self._guarded(lambda: iter(self._source))
        elif not self._memoryless:
            self._skip(state["taken"], state["generator"])
            return
        self._generator.set_state(state["generator"])  # Last: to make an iterator may take a number from it.
        self.taken = state["taken"]

    def _next(self) -> Batch | None:
        if self._iterator is None:
            # Not before: what has a state of its own makes its iterator from that.
            self._iterator = iter(self._source)
        return next(self._iterator, None)

    def _guarded(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            raise DataError.of("the job's data", self.taken, error) from error

    def _has_state(self) -> bool:
        return hasattr(self._source, "state_dict") and hasattr(self._source, "load_state_dict")

    def _skip(self, batches: int, generator: torch.Tensor) -> None:
        while self.taken < batches and not self._stopping():
            if self.next() is None:
                break
        if not self._stopping() and not torch.equal(self._generator.get_state(), generator):
            _logger.warning(
                "the job's batches are not those of the snapshot's run (another seed, batch size, data or code, or "
                "randomness that is not the generator's): the run goes on behind %d of its own batches",
                self.taken,
            )


class BatchPrefetcher:
    """Hands out batches on the loop. Whoever leaves it with a batch under way waits for its thread, not for it."""

    def __init__(self, thread: DedicatedThread, data: BatchSource, random: RunRandom) -> None:
        """``data`` is used in ``thread`` alone, from now on."""
        self._thread = thread
        self._data = data
        self._random = random
        self._ahead: asyncio.Future[Batch | None] | None = None
        self._place: Future[Place] | None = None

    async def next(self) -> Batch | None:
        """The batch behind those that were moved on from, ``None`` behind the last; a second call gives it again.

        Raises ``DataError``. A cancellation is raised when the batch is made.
        """
        return await wait_to_end(self._ahead or self._begin())

    def move_on(self, *, more: bool) -> None:
        """The batch that ``next`` gave is used; where ``more`` are wanted, the one behind it is begun."""
        self._ahead = self._place = None
        if more:
            self._begin()

    async def settled(self) -> None:
        """Returns when no batch is being made."""
        if self._ahead is not None:
            await asyncio.wait([self._ahead])

    def place(self) -> Place:
        """``data`` and ``random``, as they were when the last batch that was used had been.

        Blocks, so not on the loop; not while a step runs.
        """
        place = self._here() if self._place is None else self._place.result()
        return {**place, "random": {**place["random"], **self._random.device_state()}}

    def go_to(self, place: Place) -> None:
        """Go on from there; in the feed's thread, before the first batch. May block long."""
        with self._random.drawing():
            self._data.load_state_dict(place["data"])
        self._random.load_state_dict(place["random"])

    def _begin(self) -> asyncio.Future[Batch | None]:
        self._place = self._thread.submit(self._here)
        self._ahead = self._thread.begin(self._make)
        return self._ahead

    def _here(self) -> Place:
        return {"data": self._data.state_dict(), "random": self._random.state_dict()}

    def _make(self) -> Batch | None:
        with self._random.drawing():
            return self._data.next()
