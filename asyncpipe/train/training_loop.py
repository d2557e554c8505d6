"""The loop over the training steps of one run: one by one here, overlapping in ``overlapping_loop.py``.

One step: the batch, which the run's thread has made → ``pipe.step`` (forward and backward as tasks; the next batch is
made meanwhile) → clipping and AdamW, in a thread → listeners and progress sink → a copy of the state, if a snapshot is
due. Between two steps the event loop is free for other work. Listeners that fail do not end the run.

On accelerators the host runs ahead of the device: a step's figures are read when it is done, up to ``AHEAD`` steps
later, and before a snapshot, a change of the schedule and the end of the run::

    step 1 ─▶ update 1 ─▶ step 2 ─▶ update 2 ─▶ step 3 ─▶ update 3 ─▶ figures of 1: listeners, progress ─▶ step 4 ─▶ …

Then a loss that is not finite ends the run as it would at its own step: the device makes no update from that one on.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter

from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.result import StepResult
from asyncpipe.train.adamw import ClippedAdamW, Update, learning_rate
from asyncpipe.train.batches import BatchPrefetcher
from asyncpipe.train.blocking_calls import in_thread
from asyncpipe.train.job_file import Job
from asyncpipe.train.progress import Meter, StepListener, StepProgress
from asyncpipe.train.run_orders import RunOrders
from asyncpipe.train.snapshots.writer import SnapshotWriter
from asyncpipe.train.step_failures import NoteCallback, StepRetries, handle_non_finite
from asyncpipe.train.workload import Batch, Resumable, sample_count

__all__ = ["AHEAD", "StepByStep", "StepUnderWay", "TrainingLoop"]

AHEAD = 2
"""How many steps are under way on accelerators when the next one is begun."""

_logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, eq=False)
class StepUnderWay:
    """A step that is queued, with its update, and whose figures are not read yet."""

    result: StepResult
    update: Update
    rate: float
    began: float
    samples: int


@dataclass(kw_only=True, eq=False)
class TrainingLoop(ABC):
    """Does the steps that are left; ``run`` may be called once."""

    job: Job
    pipe: Pipeline
    batches: BatchPrefetcher
    retries: StepRetries
    meter: Meter
    tokens_per_sample: int
    listeners: list[StepListener]
    """One that raises is removed."""
    listener_failed: Callable[[str], None]
    """Called with a reason for each listener that is removed."""
    stepped: Callable[[StepProgress], None]
    """Called after each step."""
    note: NoteCallback
    snapshots: SnapshotWriter
    states: Mapping[str, Resumable]
    """What a snapshot has."""
    orders: RunOrders
    stopping: Callable[[], bool]
    """Whether no step is to begin any more."""
    change: Callable[[str], Awaitable[None]]
    """Follows another schedule, between two steps."""
    ahead: int = 0
    """How many steps may be under way when the next one is begun."""
    under_way: deque[StepUnderWay] = field(default_factory=deque, init=False)
    _settled_at: float = field(default=0.0, init=False)

    async def run(self) -> None:
        """Train until all steps are done, the batches end, or the run is to stop.

        Takes the snapshots that are due, and one after the last step.
        """
        await in_thread(self.retries.save_buffers)
        try:
            while self.begun < self.job.training.steps and not self.stopping():
                if not await self._go_on():
                    break
                if await self.snapshots.is_due(self.begun):
                    await self.settle()
                    await self.snapshots.after_step(self.meter.step, self.states)
        except Exception:
            await self.settle()  # An error of a step before this one comes first.
            raise
        await self.settle()
        await self.snapshots.after_last_step(self.meter.step, self.states)

    @abstractmethod
    async def _go_on(self) -> bool:
        """Make the changes of the schedule that are wanted, and do a step or more; false without another batch."""

    def states_after_last_step(self) -> Mapping[str, Resumable]:
        """What a snapshot of the last settled step has. No step is under way."""
        return self.states

    async def _follow_orders(self) -> None:
        if self.orders.wants_schedule:
            await self.settle()
            await self.orders.follow(self.change)

    async def settle(self, most: int = 0) -> None:
        """Read the figures of the oldest steps, until at most so many are under way. Raises their errors."""
        while len(self.under_way) > most:
            try:
                await self._settle(self.under_way.popleft())
            except BaseException:
                self.under_way.clear()
                raise

    @property
    def begun(self) -> int:
        """The number of steps that have begun."""
        return self.meter.step + len(self.under_way)

    async def _settle(self, step: StepUnderWay) -> None:
        await step.result.completed()
        # The copies to the host may still be behind other work of the caller's stream.
        update = await in_thread(step.update.wait) if self.ahead else step.update.wait()
        skipped = handle_non_finite(self.job, self.meter, update, step.rate, self.note)
        now = perf_counter()
        seconds = now - max(step.began, self._settled_at)  # Steps that overlap share the time.
        self._settled_at = now
        step.result.record.notes.gradient_norm = update.gradient_norm
        tokens, report = step.samples * self.tokens_per_sample, step.result.report
        self.meter.add(update.loss, seconds, tokens, report.bubble_ratio, skipped=skipped)
        progress = StepProgress(
            self.meter.step,
            self.job.training.steps,
            update.loss,
            step.rate,
            update.gradient_norm,
            seconds,
            step.samples,
            tokens,
            self.meter.recent_tokens_per_second,
            self.meter.remaining_seconds,
            report,
            skipped,
        )
        self._tell_listeners(progress)
        self.stepped(progress)

    def _tell_listeners(self, progress: StepProgress) -> None:
        for listener in tuple(self.listeners):
            try:
                listener.training_step(progress.loss, progress.samples, progress.tokens, progress.seconds)
            except Exception:
                _logger.exception("listener %r failed and is removed", listener)
                self.listeners = [other for other in self.listeners if other is not listener]
                self.listener_failed("raised")


@dataclass(kw_only=True, eq=False)
class StepByStep(TrainingLoop):
    """Each step begins when the one before is done, on accelerators when it is issued.

    ``ahead`` more than 0 needs updates that the device checks.
    """

    optimizer: ClippedAdamW

    async def _go_on(self) -> bool:
        start = perf_counter()
        batch = await self.batches.next()
        if batch is None or self.stopping():
            return False
        await self._follow_orders()
        await self._step(batch, start)
        await self.settle(self.ahead)
        return True

    async def _step(self, batch: Batch, start: float) -> None:
        x, target = batch
        training, done = self.job.training, self.begun
        # The next batch is begun in the loop's next turn, when the step has drawn its number and nothing else has run.
        advance = asyncio.get_running_loop().call_soon(lambda: self.batches.advance(more=done + 1 < training.steps))
        try:
            result = await self.retries.step(done + 1, x, target)
        except BaseException:
            advance.cancel()
            raise
        rate = learning_rate(done, training)

        def update_weights() -> Update:
            update = self.optimizer.update(rate, result.loss)
            if self.job.faults.non_finite == "skip" and not update.wait().finite:
                self.retries.restore_buffers()
            self.retries.save_buffers()
            return update

        # In a thread: on a CPU the update takes a while, and on a GPU it may wait for the device.
        update = await in_thread(update_weights)
        self.under_way.append(
            StepUnderWay(result=result, update=update, rate=rate, began=start, samples=sample_count(x))
        )
