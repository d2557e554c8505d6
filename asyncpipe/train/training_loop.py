"""The training steps of one run, from the first to the last.

One step, walked: the batch, which the run's thread has made → ``pipe.step`` (forward and backward, task by task; the
next batch is made meanwhile) → clip, AdamW, in a thread → tell the listeners and the progress sink → copy the state,
where a snapshot is due. Between steps the loop is free for everything else; whoever watches the run cannot end it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import perf_counter

from asyncpipe.core.engine.events import Observer
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.train.adamw import ClippedAdamW, UpdateResult, learning_rate
from asyncpipe.train.batches import BatchPrefetcher
from asyncpipe.train.blocking_calls import in_thread
from asyncpipe.train.job_file import Job
from asyncpipe.train.progress import Meter, ProgressSink, StepListener, StepProgress
from asyncpipe.train.snapshots.writer import SnapshotWriter
from asyncpipe.train.step_failures import Note, StepRetries, handle_non_finite
from asyncpipe.train.workload import Batch, Resumable

__all__ = ["StepListeners", "TrainingLoop"]

_logger = logging.getLogger(__name__)


class StepListeners:
    """Those of ``observers`` that are told each step's figures; one that raises is left out from then on."""

    def __init__(self, observers: Sequence[Observer], failed: Callable[[str], None]) -> None:
        """``failed`` is called with a reason for each that is left out."""
        self._listeners = [observer for observer in observers if isinstance(observer, StepListener)]
        self._failed = failed

    def tell(self, progress: StepProgress) -> None:
        """Raises nothing."""
        for listener in tuple(self._listeners):
            try:
                listener.training_step(progress.loss, progress.samples, progress.tokens, progress.seconds)
            except Exception:
                _logger.exception("listener %r failed and is removed", listener)
                self._listeners = [other for other in self._listeners if other is not listener]
                self._failed("raised")


class TrainingLoop:
    """Does the steps that are left; one object for one pass over them."""

    def __init__(
        self,
        job: Job,
        pipe: Pipeline,
        *,
        feed: BatchPrefetcher,
        attempts: StepRetries,
        updater: ClippedAdamW,
        meter: Meter,
        tokens_per_sample: int,
        listeners: StepListeners,
        progress: ProgressSink,
        note: Note,
    ) -> None:
        self._job = job
        self._pipe = pipe
        self._feed = feed
        self._attempts = attempts
        self._updater = updater
        self._meter = meter
        self._tokens_per_sample = tokens_per_sample
        self._listeners = listeners
        self._progress = progress
        self._note = note

    async def run(
        self,
        snapshots: SnapshotWriter,
        states: Mapping[str, Resumable],
        *,
        stopping: Callable[[], bool],
        at_border: Callable[[], Awaitable[None]],
    ) -> None:
        """Returns when no step is left, no batch comes any more, or ``stopping`` says so.

        ``at_border`` is called before every step. Takes the snapshots of ``states`` that are due, and the last one.
        """
        await in_thread(self._attempts.keep)
        while self._meter.step < self._job.training.steps and not stopping():
            start = perf_counter()
            batch = await self._feed.next()
            if batch is None or stopping():
                break
            await at_border()
            await self._step(batch, start)
            await snapshots.after_step(self._meter.step, states)
        await snapshots.after_last_step(self._meter.step, states)

    async def _step(self, batch: Batch, start: float) -> None:
        x, target = batch
        training, done = self._job.training, self._meter.step
        # Called on the loop's next turn: the step has drawn its number by then, and not yet begun otherwise.
        move_on = asyncio.get_running_loop().call_soon(lambda: self._feed.move_on(more=done + 1 < training.steps))
        try:
            result = await self._attempts.step(done + 1, x, target)
        except BaseException:
            move_on.cancel()
            raise
        rate = learning_rate(done, training)

        def update() -> UpdateResult:
            made = self._updater.update(rate, result.loss)
            if not made.finite and self._job.faults.non_finite == "skip":
                self._attempts.undo()
            self._attempts.keep()
            return made

        # In a thread: on a CPU the update takes a while, and on a GPU reading the loss waits for the device.
        update_ = await in_thread(update)
        await result.completed()
        skipped = handle_non_finite(self._job.faults, self._meter, update_, rate, self._note)
        progress = self._meter.add(
            loss=update_.loss,
            learning_rate=rate,
            gradient_norm=update_.gradient_norm,
            seconds=perf_counter() - start,
            samples=len(x),
            tokens=len(x) * self._tokens_per_sample,
            report=result.report,
            skipped=skipped,
        )
        self._listeners.tell(progress)
        self._progress.stepped(progress)
