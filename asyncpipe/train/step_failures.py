"""What happens when a training step fails or its loss is not finite, as a job's ``[faults]`` table says.

::

    a task fails ─▶ buffers and random numbers are reset ─▶ the step runs again, same batch ──┬─▶ the run continues
         │             (gradients and weights have not changed; not if steps overlap)         │
         └── hung task, out of memory twice, or no retries left: the error ends the run ◀─────┘

    loss or gradient norm is not finite ─▶ fail: an error ends the run, before the weights are updated (behind it, if
                                           steps overlap)
                                        ─▶ skip: this update is skipped
                                        ─▶ ignore

A run does not go back to a snapshot by itself; a service starts a new run, which resumes from it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from math import nan
from typing import Any, NoReturn

import torch

from asyncpipe.errors import AsyncpipeError, HungTaskError, TaskError
from asyncpipe.ops.device.device_errors import is_device_error
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.result import StepResult
from asyncpipe.train.adamw import UpdateResult
from asyncpipe.train.batches import BatchPrefetcher
from asyncpipe.train.blocking_calls import in_thread
from asyncpipe.train.buffer_rollback import BufferRollback
from asyncpipe.train.job_file import FaultTable, Job
from asyncpipe.train.out_of_memory import explain_out_of_memory
from asyncpipe.train.progress import Meter
from asyncpipe.train.randomness import RunRandom

__all__ = ["NonFiniteLossError", "NoteCallback", "OutOfMemoryError", "StepRetries", "handle_non_finite"]

NoteCallback = Callable[[int, str], None]
"""Reports a message with a level of ``logging`` to the log and the progress sink; on the run's loop."""

OUT_OF_MEMORY_RETRIES = 1
"""A step that filled the memory does so again, unless something else on the device has released some meanwhile."""


class NonFiniteLossError(AsyncpipeError, ArithmeticError):
    """A step's loss or gradient norm is NaN or infinite; the weights are as they were before the step.

    If steps overlap, the weights are updated with it: only those of the last snapshot are right.
    """

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


def handle_non_finite(job: Job, meter: Meter, update: UpdateResult, learning_rate: float, note: NoteCallback) -> bool:
    """Whether the update of the step after those that ``meter`` has counted was skipped; reports it if so.

    Raises ``NonFiniteLossError`` if the run must end.
    """
    faults = job.faults
    if update.finite or faults.non_finite == "ignore":
        return False
    step = meter.step + 1
    problem = f"step {step}: the loss is {update.loss:g} and the gradient norm {update.gradient_norm:g}"
    if faults.non_finite == "skip" and meter.skipped_in_a_row < faults.most_skipped:
        in_a_row = f"{meter.skipped_in_a_row + 1} in a row, at most {faults.most_skipped}"
        note(logging.WARNING, f"{problem}; the weights are not updated ({in_a_row})")
        return True
    after = f", after {meter.skipped_in_a_row} skipped updates in a row" if faults.non_finite == "skip" else ""
    weights, skipping = "are as they were before it", 'non_finite = "skip" skips single updates'
    if job.training.overlap:
        weights = "are updated with it, since steps overlap: go on from the last snapshot"
        skipping = "overlap = false leaves the weights as they were, and skips single updates"
    advice = (
        f"a learning rate below {learning_rate:g}, a longer warm-up or a smaller clip often help; so does a check of "
        f"the data for values that are NaN or infinite. {skipping}"
    )
    raise NonFiniteLossError(
        f"{problem}{after}; the weights {weights}; {advice}",
        step=step,
        loss=update.loss,
        gradient_norm=update.gradient_norm,
    )


class StepRetries:
    """Runs training steps and retries failed ones as ``[faults]`` allow; a failed attempt leaves no trace."""

    def __init__(
        self, pipe: Pipeline, faults: FaultTable, random: RunRandom, batches: BatchPrefetcher, note: NoteCallback
    ) -> None:
        self._pipe = pipe
        self._retries = faults.step_retries
        self._saves_buffers = faults.step_retries > 0 or faults.non_finite == "skip"
        self._random = random
        self._batches = batches
        self._note = note
        self._buffers = BufferRollback(pipe.module)

    def save_buffers(self) -> None:
        """Save the model's buffers, which each attempt of the next step starts from. Blocks; not while a step runs."""
        if self._saves_buffers:
            self._buffers.save()

    def restore_buffers(self) -> None:
        """Restore the saved buffers, because the update of the step is skipped. Blocks; not while a step runs."""
        self._buffers.restore()

    async def step(self, number: int, x: Any, target: Any) -> StepResult:
        """``pipe.step`` for the step of this ``number``, with retries. Call ``save_buffers`` before.

        Raises the last ``TaskError``, or ``OutOfMemoryError`` in its place.
        """
        before, after = self._random.position, None
        failures = 0
        while True:
            try:
                return await self._pipe.step(x, target, return_outputs=False)
            except TaskError as error:
                failures += 1
                await self._check(error, number, failures)
            finally:
                if after is not None:
                    self._random.position = after
            # The prefetcher may draw from the same generator, so its batch is finished before the generator is reset
            # for the next attempt. The prefetcher begins that batch in the loop's next turn.
            await asyncio.sleep(0)
            await self._batches.settled()
            after, self._random.position = self._random.position, before
            with suppress(RuntimeError):  # A device that has failed; the next attempt says so.
                await in_thread(torch.cuda.empty_cache)

    async def give_up(self, error: TaskError, number: int) -> NoReturn:
        """Raise ``error`` of the step of this ``number``, which cannot be retried, or ``OutOfMemoryError``."""
        self._end(error, await self._explain(error), number)

    async def _check(self, error: TaskError, number: int, failures: int) -> None:
        """Raise the error that ends the run, unless the step may be retried."""
        explained = await self._explain(error)
        retries = self._retries if explained is None else min(self._retries, OUT_OF_MEMORY_RETRIES)
        cause = error.__cause__
        # A device that has failed fails again, until the process ends.
        final = isinstance(cause, HungTaskError) or not isinstance(cause, Exception) or is_device_error(cause)
        if not final and failures <= retries and self._buffers.restore():
            again = f"it is tried again with the same batch ({failures} of {retries})"
            self._note(logging.WARNING, f"step {number} failed and {again}: {error}")
            return
        self._end(error, explained, number)

    async def _explain(self, error: TaskError) -> str | None:
        explained = await in_thread(lambda: explain_out_of_memory(error, self._pipe))
        if explained is not None:
            self._note(logging.ERROR, explained)
        return explained

    def _end(self, error: TaskError, explained: str | None, number: int) -> NoReturn:
        if explained is not None:
            raise OutOfMemoryError(f"step {number}: {explained}") from error
        raise error
