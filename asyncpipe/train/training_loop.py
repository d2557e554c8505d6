"""The loop over the training steps of one run.

One step: the batch, which the run's thread has made → ``pipe.step`` (forward and backward as tasks; the next batch is
made meanwhile) → clipping and AdamW, in a thread → listeners and progress sink → a copy of the state, if a snapshot is
due. Between two steps the event loop is free for other work. Listeners that fail do not end the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.train.adamw import ClippedAdamW, UpdateResult, learning_rate
from asyncpipe.train.batches import BatchPrefetcher
from asyncpipe.train.blocking_calls import in_thread
from asyncpipe.train.job_file import Job
from asyncpipe.train.progress import Meter, ProgressSink, StepListener, StepProgress
from asyncpipe.train.snapshots.writer import SnapshotWriter
from asyncpipe.train.step_failures import NoteCallback, StepRetries, handle_non_finite
from asyncpipe.train.workload import Batch, Resumable

__all__ = ["TrainingLoop"]

_logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class TrainingLoop:
    """Does the steps that are left; ``run`` may be called once."""

    job: Job
    pipe: Pipeline
    batches: BatchPrefetcher
    retries: StepRetries
    optimizer: ClippedAdamW
    meter: Meter
    tokens_per_sample: int
    listeners: list[StepListener]
    """One that raises is removed."""
    listener_failed: Callable[[str], None]
    """Called with a reason for each listener that is removed."""
    progress: ProgressSink
    note: NoteCallback

    async def run(
        self,
        snapshots: SnapshotWriter,
        states: Mapping[str, Resumable],
        *,
        stopping: Callable[[], bool],
        before_step: Callable[[], Awaitable[None]],
    ) -> None:
        """Train until all steps are done, the batches end, or ``stopping`` returns true.

        Takes the snapshots of ``states`` that are due, and one after the last step.
        """
        await in_thread(self.retries.save_buffers)
        while self.meter.step < self.job.training.steps and not stopping():
            start = perf_counter()
            batch = await self.batches.next()
            if batch is None or stopping():
                break
            await before_step()
            await self._step(batch, start)
            await snapshots.after_step(self.meter.step, states)
        await snapshots.after_last_step(self.meter.step, states)

    async def _step(self, batch: Batch, start: float) -> None:
        x, target = batch
        training, done = self.job.training, self.meter.step
        # The next batch is begun in the loop's next turn, when the step has drawn its number and nothing else has run.
        advance = asyncio.get_running_loop().call_soon(lambda: self.batches.advance(more=done + 1 < training.steps))
        try:
            result = await self.retries.step(done + 1, x, target)
        except BaseException:
            advance.cancel()
            raise
        rate = learning_rate(done, training)

        def update_weights() -> UpdateResult:
            update = self.optimizer.update(rate, result.loss)
            if not update.finite and self.job.faults.non_finite == "skip":
                self.retries.restore_buffers()
            self.retries.save_buffers()
            return update

        # In a thread: on a CPU the update takes a while, and on a GPU reading the loss waits for the device.
        update = await in_thread(update_weights)
        await result.completed()
        skipped = handle_non_finite(self.job.faults, self.meter, update, rate, self.note)
        progress = self.meter.add(
            loss=update.loss,
            learning_rate=rate,
            gradient_norm=update.gradient_norm,
            seconds=perf_counter() - start,
            samples=len(x),
            tokens=len(x) * self.tokens_per_sample,
            report=result.report,
            skipped=skipped,
        )
        self._tell_listeners(progress)
        self.progress.stepped(progress)

    def _tell_listeners(self, progress: StepProgress) -> None:
        for listener in tuple(self.listeners):
            try:
                listener.training_step(progress.loss, progress.samples, progress.tokens, progress.seconds)
            except Exception:
                _logger.exception("listener %r failed and is removed", listener)
                self.listeners = [other for other in self.listeners if other is not listener]
                self.listener_failed("raised")
