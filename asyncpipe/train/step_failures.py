"""What goes wrong in a training step, and what a job's ``[faults]`` say to that.

::

    a task fails ─▶ buffers and random numbers as before the step ─▶ again, same batch ──┬─▶ as if nothing had been
         │             (gradients and weights are untouched)                             │
         └── hung, or out of memory twice, or tried often enough: the error leaves the run

    loss or gradient norm is no finite number ─▶ fail: the error leaves the run, before the weights are updated
                                              ─▶ skip: this update is left out, and the run goes on
                                              ─▶ ignore

Going back to a snapshot is not the run's own business: whoever started it makes a new one, which resumes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from math import nan
from typing import Any

import torch

from asyncpipe.errors import AsyncpipeError, HungTaskError, TaskError
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.result import StepResult
from asyncpipe.train.adamw import UpdateResult
from asyncpipe.train.batches import BatchPrefetcher
from asyncpipe.train.blocking_calls import in_thread
from asyncpipe.train.buffer_rollback import BufferRollback
from asyncpipe.train.job_file import FaultTable
from asyncpipe.train.out_of_memory import explain_out_of_memory
from asyncpipe.train.progress import Meter
from asyncpipe.train.randomness import RunRandom

__all__ = ["NonFiniteLossError", "Note", "OutOfMemoryError", "StepRetries", "handle_non_finite"]

Note = Callable[[int, str], None]
"""Tells a line, of a level of ``logging``, to the log and to whoever watches the run; on the run's loop."""

OUT_OF_MEMORY_RETRIES = 1
"""What fills the memory does so again, unless something else on the device has gone meanwhile."""


class NonFiniteLossError(AsyncpipeError, ArithmeticError):
    """A step's loss or gradient norm is NaN or infinite; the weights are as they were before the step."""

    def __init__(self, message: str, *, step: int = 0, loss: float = nan, gradient_norm: float = nan) -> None:
        super().__init__(message)
        self.step = step
        """From 1."""
        self.loss = loss
        self.gradient_norm = gradient_norm


class OutOfMemoryError(AsyncpipeError, MemoryError):
    """A device has no memory left; the message says which stage, what it held and what would help.

    The ``TaskError`` is its cause.
    """


# A loss that is no number


def handle_non_finite(faults: FaultTable, meter: Meter, update: UpdateResult, rate: float, note: Note) -> bool:
    """Whether the update of the step after those that ``meter`` has counted was left out; tells of it.

    Raises ``NonFiniteLossError`` where that must end the run. ``rate`` is the step's learning rate.
    """
    if update.finite or faults.non_finite == "ignore":
        return False
    step = meter.step + 1
    what = f"step {step}: the loss is {update.loss:g} and the gradient norm {update.gradient_norm:g}"
    if faults.non_finite == "skip" and meter.skipped_in_a_row < faults.most_skipped:
        in_a_row = f"{meter.skipped_in_a_row + 1} in a row, at most {faults.most_skipped}"
        note(logging.WARNING, f"{what}; the weights are not updated ({in_a_row})")
        return True
    after = f", after {meter.skipped_in_a_row} skipped updates in a row" if faults.non_finite == "skip" else ""
    help_ = (
        f"a learning rate below {rate:g}, a longer warm-up or a smaller clip often help; so may a look at the data for "
        'values that are no numbers. non_finite = "skip" leaves single updates out'
    )
    raise NonFiniteLossError(
        f"{what}{after}; the weights are as they were before it; {help_}",
        step=step,
        loss=update.loss,
        gradient_norm=update.gradient_norm,
    )


# Steps that fail


class StepRetries:
    """Does training steps, each as often as ``[faults]`` allow, so that one that went well at last left no trace."""

    def __init__(
        self, pipe: Pipeline, faults: FaultTable, random: RunRandom, feed: BatchPrefetcher, note: Note
    ) -> None:
        self._pipe = pipe
        self._retries = faults.step_retries
        self._keeps = faults.step_retries > 0 or faults.non_finite == "skip"
        self._random = random
        self._feed = feed
        self._note = note
        self._buffers = BufferRollback(pipe.module)

    def keep(self) -> None:
        """The model is as the next step shall find it, at each attempt. Blocks for a moment; nothing else runs."""
        if self._keeps:
            self._buffers.keep()

    def undo(self) -> None:
        """A step is left out: running statistics shall not have its numbers. Blocks as ``keep``."""
        self._buffers.undo()

    async def step(self, number: int, x: Any, target: Any) -> StepResult:
        """``pipe.step``, for the step of this ``number``, again and again if need be. ``keep`` goes before.

        Raises the last ``TaskError``, or ``OutOfMemoryError`` in its place.
        """
        before, behind = self._random.position, None
        failures = 0
        while True:
            try:
                return await self._pipe.step(x, target, return_outputs=False)
            except TaskError as error:
                failures += 1
                await self._check(error, number, failures)
            finally:
                if behind is not None:
                    self._random.position = behind
            # The loader may draw from the same generator, so it is let through before the step's number is drawn again;
            # on the loop's next turn it is at work for sure.
            await asyncio.sleep(0)
            await self._feed.settled()
            behind, self._random.position = self._random.position, before
            await in_thread(torch.cuda.empty_cache)

    async def _check(self, error: TaskError, number: int, failures: int) -> None:
        """Raise what the run ends with, unless the step may be tried again."""
        explained = await in_thread(lambda: explain_out_of_memory(error, self._pipe))
        retries = self._retries if explained is None else min(self._retries, OUT_OF_MEMORY_RETRIES)
        if explained is not None:
            self._note(logging.ERROR, explained)
        final = isinstance(error.__cause__, HungTaskError) or not isinstance(error.__cause__, Exception)
        if not final and failures <= retries and self._buffers.undo():
            again = f"it is tried again with the same batch ({failures} of {retries})"
            self._note(logging.WARNING, f"step {number} failed and {again}: {error}")
            return
        if explained is not None:
            raise OutOfMemoryError(f"step {number}: {explained}") from error
        raise error
