"""One running job: a ``TrainingRun``, told on to the job's log, the store, the live page and the metrics.

::

    TrainingRun ── stepped ───▶ log (at once)      store: the step, at most once a second
                ── snapshot ──▶ store ──▶ log      acknowledged when both know, never before it is on disk
                ── noted ─────▶ log
                ── ends ──────▶ RunOutcome ──▶ next_state ──▶ the manager writes the transition

What a run came to is plain data: an error is turned into words here, since it holds the frames, and with them the
tensors, of the step that failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from asyncpipe.core.engine.events import Outcome, StepRecord
from asyncpipe.core.engine.share import Share
from asyncpipe.errors import AsyncpipeError, JobFileError, TaskError
from asyncpipe.observe.live import LiveView
from asyncpipe.observe.metrics import PipelineCollector
from asyncpipe.service.job_states import JobRecord, JobState, PriorityClass
from asyncpipe.service.jobs.job_log import JobLog, LossRow
from asyncpipe.service.store.job_store import JobStore
from asyncpipe.train.batches import DataError
from asyncpipe.train.job_file import Job
from asyncpipe.train.progress import RunStarted, StepProgress, TrainingSummary
from asyncpipe.train.schedule_changes import NoMoreStepsError
from asyncpipe.train.step_failures import NonFiniteLossError
from asyncpipe.train.workload import Workload

__all__ = ["JobRun", "RunOutcome", "RunEnding", "Trainer", "is_permanent", "next_state", "share_of"]

_logger = logging.getLogger(__name__)

REPORT_SECONDS = 1.0
"""Steps are told to the store at most so often."""


class RunEnding(Enum):
    """How a run ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """After a step, with a snapshot, because it was asked to."""
    CANCELLED = "cancelled"
    """Between two tasks."""
    FAILED = "failed"
    """A snapshot may help: a task failed, hung, or had no memory; data could not be read."""
    HOPELESS = "hopeless"
    """It would fail again: the job does not fit its entry or this machine, or its loss is no number any more."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What a run came to, and in words why."""

    ending: RunEnding
    cause: str


def next_state(
    outcome: RunOutcome, asked: JobState | None, asked_cause: str, failures: int, retries: int, shutdown: str | None
) -> tuple[JobState, str]:
    """What a job becomes whose run came to ``outcome``, and the transition's cause.

    ``asked`` is what it was asked to become meanwhile, if anything. ``failures`` counts this run, if it failed, and
    those that failed before it since the last snapshot; ``retries`` of them are forgiven. ``shutdown`` is why the
    service ends, if it does.
    """
    if outcome.ending is RunEnding.FINISHED:
        return JobState.FINISHED, outcome.cause
    if asked is JobState.CANCELLED:
        return JobState.CANCELLED, asked_cause
    if outcome.ending is RunEnding.HOPELESS:
        return JobState.FAILED, outcome.cause
    if outcome.ending is RunEnding.FAILED and failures > retries:
        times = f" ({failures} times since the last snapshot)" if failures > 1 else ""
        return JobState.FAILED, outcome.cause + times
    if asked is JobState.PAUSED:
        return JobState.PAUSED, asked_cause
    if outcome.ending is RunEnding.FAILED:
        return JobState.QUEUED, f"tried again from its last snapshot ({failures} of {retries}): {outcome.cause}"
    return JobState.QUEUED, shutdown or "goes on, as it was asked before it had stopped"


def is_permanent(error: BaseException) -> bool:
    """Whether a run that ended with ``error`` would end so again, whatever snapshot it goes on from.

    That is what the package itself says of a job, its values and types, and of a loss that is no number; a loader that
    fails, a task that raises or hangs, and memory that was not there may be better next time.
    """
    cause = error.__cause__ if isinstance(error, TaskError) else error
    if isinstance(cause, DataError):
        return False
    if isinstance(cause, JobFileError | NonFiniteLossError):
        return True
    return isinstance(cause, AsyncpipeError) and isinstance(cause, ValueError | TypeError)


class Trainer(Protocol):
    """What is run: ``TrainingRun``, or in tests what stands for it."""

    async def run(self) -> TrainingSummary:
        """Train to the end."""

    def stop(self) -> None:
        """End after the step under way."""

    async def change_schedule(self, name: str) -> None:
        """Follow another schedule from the next step on."""


MakeTrainer = Callable[..., Trainer]


def share_of(record: JobRecord) -> Share:
    """The job's share of its devices."""
    return Share(record.id, weight=record.weight, background=record.priority_class is PriorityClass.BACKGROUND)


class JobRun:
    """One run of a job, from its begin to its end; belongs to the service's loop. ``run`` is awaited once."""

    def __init__(
        self,
        record: JobRecord,
        job: Job,
        collector: PipelineCollector,
        store: JobStore,
        peaks: Mapping[str, int],
        retried: Callable[[], object] = lambda: None,
    ) -> None:
        """``record`` is the job's as it began to run; the manager replaces it when the job is asked something.

        ``retried`` is called for each step that was tried again.
        """
        self.record = record
        self.job = job
        self.peaks = peaks
        """Bytes by device that it counts for."""
        self.collector = collector
        self.view = LiveView(job.name, steps=job.training.steps)
        """What the live page shows."""
        self.schedule_turn = asyncio.Lock()
        """One change of the schedule at a time."""
        self.has_snapshot = False
        """Whether this run has taken one."""
        self._store = store
        self._retried = retried
        self._failed_steps = 0
        """In a row; behind the last one the run ends, or it was tried again."""
        self._log: JobLog | None = None
        self._training: Trainer | None = None
        self._task: asyncio.Task[TrainingSummary] | None = None
        self._begun = self._stopping = self._cancelling = False
        self._step: int | None = None
        self._snapshots: list[tuple[int, str]] = []
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._is_told = False

    # What the manager does with it

    async def run(
        self, make: MakeTrainer, make_workload: Callable[[], Workload], log: JobLog, **options: Any
    ) -> RunOutcome:
        """Train until it ends however it ends; raises nothing of the job's. ``options`` are ``make``'s."""
        self._log = log
        self._begun = True
        reports = asyncio.create_task(self._report(), name=f"asyncpipe reports of {self.record.id}")
        try:
            return await self._train(make, make_workload, options)
        finally:
            self.view.end()
            self._training = self._task = None
            await self._finish(reports)
            self._log = None

    def stop(self) -> None:
        """Let it end after its step, with a snapshot."""
        self._stopping = True
        if self._training is not None:
            self._training.stop()

    def cancel(self) -> None:
        """Let it end between two tasks."""
        self._cancelling = True
        if self._task is not None:
            self._task.cancel()

    async def change_schedule(self, name: str) -> bool:
        """Follow ``name`` from the next step on; false if the run ends before that. Raises ``ScheduleError``."""
        training, task = self._training, self._task
        if training is None or task is None:
            if not self._begun:
                self.job = self.job.override("pipeline", schedule=name)
            return not self._begun
        change = asyncio.create_task(training.change_schedule(name))
        try:
            await asyncio.wait([change, task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not change.done():
                change.cancel()
                await asyncio.wait([change])
        if change.cancelled():
            return False
        error = change.exception()
        if isinstance(error, NoMoreStepsError) or (error is not None and (self._stopping or task.done())):
            return False
        change.result()
        return True

    # Training

    async def _train(
        self, make: MakeTrainer, make_workload: Callable[[], Workload], options: Mapping[str, Any]
    ) -> RunOutcome:
        try:
            self._training = make(
                self.job,
                make_workload,
                progress=self,
                collector=self.collector,
                observers=[self.view, self],
                share=share_of(self.record),
                **options,
            )
            self._task = asyncio.create_task(self._training.run(), name=f"asyncpipe job {self.record.id}")
        except Exception as error:  # noqa: BLE001 - told
            return _failed(error)
        if self._stopping:
            self._training.stop()
        if self._cancelling:
            self._task.cancel()
        return await self._outcome(self._task)

    async def _outcome(self, task: asyncio.Task[TrainingSummary]) -> RunOutcome:
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:  # The service's loop ends: nothing may be left behind.
            task.cancel()
            await asyncio.wait([task])
            raise
        if task.cancelled():
            if self._cancelling:
                return RunOutcome(RunEnding.CANCELLED, "cancelled")
            return RunOutcome(RunEnding.FAILED, "its code raised a cancellation, which nobody had asked for")
        error = task.exception()
        if error is not None:
            return _failed(error)
        summary = task.result()
        if summary.evaluation is not None:
            self.noted(logging.INFO, f"held-out loss {summary.evaluation:.4f}")
        if summary.sample is not None:
            self.noted(logging.INFO, f"sample: {summary.sample}")
        if summary.stopped and self._stopping:
            return RunOutcome(RunEnding.STOPPED, f"stopped after step {summary.steps}")
        if not self._has_saved(summary):
            # It would be lost: after another try from the last snapshot there may be room.
            return RunOutcome(RunEnding.FAILED, f"the snapshot of its last step, {summary.steps}, could not be written")
        if summary.steps < self.job.training.steps:
            return RunOutcome(RunEnding.FINISHED, f"its data ended after {summary.steps} steps")
        return RunOutcome(RunEnding.FINISHED, f"all {summary.steps} steps are done")

    def _has_saved(self, summary: TrainingSummary) -> bool:
        wanted = self.job.snapshots is not None and summary.steps > 0
        return not wanted or (summary.snapshot is not None and summary.snapshot.name == f"step-{summary.steps}")

    # What the run tells, on its loop

    def started(self, run: RunStarted) -> None:
        """The model is on its devices."""
        self.noted(logging.INFO, f"began on {', '.join(run.devices)}, {run.parameters:,} parameters")

    def stepped(self, progress: StepProgress) -> None:
        """A step is done: in the log when this returns, in the store soon."""
        if self._log is not None:
            rate, seconds = progress.learning_rate, progress.seconds
            self._log.step(LossRow(progress.step, progress.loss, rate, seconds, progress.tokens))
        self._step = progress.step
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(REPORT_SECONDS, self._news.set)

    def step_completed(self, record: StepRecord) -> None:
        """A step ended, in whatever way; as an observer."""
        if record.outcome is Outcome.FAILED:
            self._failed_steps += 1
            if self._failed_steps > 1:
                self._retried()
        elif self._failed_steps:
            self._failed_steps = 0
            self._retried()

    def entered(self, phase: str) -> None:
        """Something else than training begins."""
        self.noted(logging.INFO, phase)

    def noted(self, level: int, text: str) -> None:
        """A line for the job's log."""
        if self._log is not None:
            self._log.note(level, text)

    def snapshot(self, step: int, path: Path) -> None:
        """A snapshot is on disk."""
        self.has_snapshot = True
        self._snapshots.append((step, path.name))
        self._news.set()

    # To the store

    async def _report(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            await self._tell()

    async def _tell(self) -> None:
        """Tell the store what it does not know; what it does not take is told next time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            while self._snapshots:
                step, name = self._snapshots[0]
                await self._store.progress(self.record.id, max(step, self._step or 0), name)
                del self._snapshots[0]
                if self._log is not None:
                    self._log.snapshot(step, name)
            if (done := self._step) is not None:
                await self._store.progress(self.record.id, done)
                self._step = None if self._step == done else self._step
            self._is_told = False
        except AsyncpipeError as error:
            if not self._is_told:
                self._is_told = True
                self.noted(logging.WARNING, f"its progress is not in the store: {error}")

    async def _finish(self, reports: asyncio.Task[None]) -> None:
        reports.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait([reports])
        await self._tell()
        if self._timer is not None:
            self._timer.cancel()


def _failed(error: BaseException) -> RunOutcome:
    if not isinstance(error, AsyncpipeError):
        _logger.error("a job failed with an error that is not asyncpipe's", exc_info=error)
    words = str(error) if isinstance(error, AsyncpipeError) else f"{type(error).__name__}: {error}"
    return RunOutcome(RunEnding.HOPELESS if is_permanent(error) else RunEnding.FAILED, words or type(error).__name__)
