"""A running job as the service sees it: it starts a ``Run`` and passes on what this reports.

::

    Run ────────── stepped, noted ─▶ log ──batches──▶ store
     ────────── snapshot ───────▶ log ──at once──▶ store      after the snapshot is on disk
     ────────── ends ───────────▶ RunOutcome ──▶ next_state ──▶ the manager makes the transition
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from asyncpipe.core.engine.events import Outcome
from asyncpipe.core.policies.share import Share
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.errors import AsyncpipeError, ScheduleError
from asyncpipe.observe.live import LiveView
from asyncpipe.observe.metrics import PipelineCollector
from asyncpipe.service.job_states import JobRecord
from asyncpipe.service.jobs.artifacts import TIMELINE, TRACE
from asyncpipe.service.jobs.failure_texts import root_line
from asyncpipe.service.jobs.job_lines import log_note
from asyncpipe.service.jobs.job_log import JobLog
from asyncpipe.service.jobs.last_view import MOST, keep_view, steps_of_view
from asyncpipe.service.jobs.outlook import Pace
from asyncpipe.service.jobs.run_log import RunLog, last_said
from asyncpipe.service.jobs.run_outcome import FAILURES, RunEnding, RunOutcome, failure
from asyncpipe.service.store.job_records import LossRow
from asyncpipe.train.blocking_calls import in_thread
from asyncpipe.train.job_file import Job
from asyncpipe.train.progress import RunStarted, StepProgress, TrainingSummary
from asyncpipe.train.redaction import redacted
from asyncpipe.train.run_orders import NoMoreStepsError, RunOrders
from asyncpipe.train.trace_files import TraceRecorder
from asyncpipe.train.workload import Workload

__all__ = ["JobRun", "MakeTrainer", "Run"]

TRACED_STEPS, TRACED_TASKS = 3, 20_000
"""How many of the last steps a run's trace has, and the most tasks of several."""
CRASH_LINES = 500
"""How many of the last lines of standard error are searched for the stack of a crash."""


class Run(Protocol):
    """What trains: a ``LastingRun`` here, or a ``ProcessRun``, which has one in another process."""

    async def run(self) -> TrainingSummary:
        """Train to the end."""


MakeTrainer = Callable[..., Run]


class JobRun:
    """A running job as the service sees it, around the ``Run`` that trains. On the service's loop; ``run`` once."""

    def __init__(
        self,
        record: JobRecord,
        job: Job,
        collector: PipelineCollector,
        retried: Callable[[], object] = lambda: None,
    ) -> None:
        """``record`` is the job's at the start of the run; ``ActiveJobs`` replaces it when the job changes.

        ``retried`` is called for each step that is tried again.
        """
        self.record = record
        self.job = job
        self.collector = collector
        self.orders = RunOrders(_share_of(record))
        """What is asked of it."""
        self.view = LiveView(job.name, steps=job.training.steps)
        """The state of the job's live page."""
        self.trace = TraceRecorder(TRACED_STEPS, TRACED_TASKS)
        """The last steps, which are written when the run has ended."""
        self.schedule_turn = asyncio.Lock()
        """Held while the schedule is changed."""
        self.pace = Pace(job.training.steps)
        self.waits_for: str | None = None
        """Why it does not train now: it waits for lost workers."""
        self.workers: tuple[str, ...] = ()
        """Those that it has stages in."""
        self.has_snapshot = False
        """Whether this run has taken a snapshot."""
        self.on_snapshot: Callable[[], object] = lambda: None
        """Called when it has."""
        self._retried = retried
        self._earlier: list[tuple[int, float, float, int, int]] = []
        """Steps of runs before this one, for the live page."""
        self._failed_steps = 0
        """Failed attempts at the current step."""
        self._log: JobLog
        """From the beginning of ``run`` on."""
        self.run_log: RunLog
        """What it says; from then on as well."""
        self._task: asyncio.Task[TrainingSummary] | None = None
        self._started = self._cancelling = False
        self.expired: str | None = None
        """Why it is to fail, once it has stopped."""

    # Called by the manager

    async def run(
        self, make: MakeTrainer, make_workload: Callable[[], Workload], log: JobLog, **options: Any
    ) -> RunOutcome:
        """Train to the end, whatever that is; raises no error of the job. ``options`` are passed to ``make``."""
        self._log = log
        self.run_log = RunLog(log.folder, self.record.attempts)
        RunLog.here.set(self.run_log)
        try:
            await self._say_what(f"begins: {self.record.cause}")
            try:
                self._earlier = steps_of_view(await log.store.spread_losses(self.record.id, MOST))
            except AsyncpipeError as error:  # The page does without.
                self.noted(logging.WARNING, f"its page cannot show its first steps: {error}")
            self._started = True
            outcome = await self._rooted(await self._train(make, make_workload, options))
            await self._say_what(f"{outcome.ending.value}: {outcome.cause}")
            return outcome
        finally:
            self.view.end()
            try:
                await in_thread(lambda: keep_view(log.folder, self.view))
            except OSError as error:
                self.noted(logging.WARNING, f"its page cannot be kept up to date: {error}")
            self.orders.close()
            self._task = None
            self.run_log.close()
            await log.flush()
            await in_thread(lambda: self._write_trace(log.folder))

    def cancel(self) -> None:
        """End the run between two tasks."""
        self._cancelling = True
        if self._task is not None:
            self._task.cancel()

    async def change_schedule(self, name: str) -> bool:
        """Use the schedule ``name`` from the next step on; false if the run ends before. Raises ``ScheduleError``."""
        if not self._started:
            self.job = self.job.override("pipeline", schedule=name)
            return True
        try:
            await self.orders.change_schedule(name)
        except ScheduleError as error:
            if isinstance(error, NoMoreStepsError) or self.orders.stopping:
                return False
            raise
        return True

    def change_share(self) -> None:
        """Have the weight and the class that its record has now."""
        self.orders.change_share(_share_of(self.record))

    def expire(self, cause: str) -> None:
        """End the run after its step, with a snapshot, as a failure that trying again would not repair."""
        self.expired = cause
        self.orders.stop()

    # Training

    async def _train(
        self, make: MakeTrainer, make_workload: Callable[[], Workload], options: Mapping[str, Any]
    ) -> RunOutcome:
        try:
            training = make(
                self.job,
                make_workload,
                progress=self,
                collector=self.collector,
                observers=[self.view, self],
                orders=self.orders,
                **options,
            )
            self._task = asyncio.create_task(training.run(), name=f"asyncpipe job {self.record.id}")
        except Exception as error:  # noqa: BLE001 - becomes the outcome
            return failure(error, self.said)
        if self._cancelling:
            self._task.cancel()
        return await self._outcome(self._task)

    async def _outcome(self, task: asyncio.Task[TrainingSummary]) -> RunOutcome:
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:  # The service's loop ends; the training must end before it.
            task.cancel()
            await asyncio.wait([task])
            raise
        if task.cancelled():
            if self.expired is not None:
                return RunOutcome(RunEnding.FAILED_PERMANENTLY, self.expired)
            if self._cancelling:
                return RunOutcome(RunEnding.CANCELLED, "cancelled")
            return RunOutcome(RunEnding.FAILED, "its code raised CancelledError without being cancelled")
        error = task.exception()
        if error is not None:
            return failure(error, self.said)
        summary = task.result()
        if summary.evaluation is not None:
            self.noted(logging.INFO, f"held-out loss {summary.evaluation:.4f}")
        if summary.sample is not None:
            self.noted(logging.INFO, f"sample: {summary.sample}")
        if summary.stopped and self.expired is not None:
            return RunOutcome(RunEnding.FAILED_PERMANENTLY, f"{self.expired}; it stopped after step {summary.steps}")
        if summary.stopped and self.orders.stopping:
            return RunOutcome(RunEnding.STOPPED, f"stopped after step {summary.steps}")
        if not self._has_saved(summary):
            # The steps since the last snapshot would be lost; a retry may find room on the disk.
            return RunOutcome(RunEnding.FAILED, f"the snapshot of its last step, {summary.steps}, could not be written")
        if summary.steps < self.job.training.steps:
            return RunOutcome(RunEnding.FINISHED, f"its data ended after {summary.steps} steps")
        return RunOutcome(RunEnding.FINISHED, f"all {summary.steps} steps are done")

    def _has_saved(self, summary: TrainingSummary) -> bool:
        wanted = self.job.snapshots is not None and summary.steps > 0
        return not wanted or (summary.snapshot is not None and summary.snapshot.name == f"step-{summary.steps}")

    async def _rooted(self, outcome: RunOutcome) -> RunOutcome:
        """``outcome``, which has a root if the run has failed, also where it has left no exception."""
        if outcome.root is not None or outcome.ending not in FAILURES:
            return outcome
        folder, run = self._log.folder, self.record.attempts
        last = await in_thread(lambda: last_said(folder, run, CRASH_LINES, "stderr"))
        return replace(outcome, root=root_line("\n".join(line.text for line in last.lines), outcome.cause))

    async def _say_what(self, text: str) -> None:
        await in_thread(lambda: self.said("service", f"run {self.record.attempts} {text}"))

    # Called by the training

    def started(self, run: RunStarted) -> None:
        """The model is on its devices."""
        self.workers = run.workers
        if run.done or self.pace.has_begun:  # Else nothing went before.
            self.view.go_on(run.done, self._earlier)
        self._earlier = []
        self.noted(logging.INFO, f"started on {run.where}, {run.parameters:,} parameters")

    def stepped(self, progress: StepProgress) -> None:
        """A step has ended; it is in the log when this returns, and in the store soon."""
        rate, seconds, norm = progress.learning_rate, progress.seconds, progress.gradient_norm
        self._log.step(LossRow(progress.step, progress.loss, rate, seconds, progress.tokens, norm))
        self.pace.add(progress.step, progress.seconds, progress.tokens)

    def step_completed(self, record: StepRecord) -> None:
        """Keep the step for the trace, and count failed steps and retries, as an observer."""
        self.trace.step_completed(record)
        if record.outcome is Outcome.FAILED:
            self._failed_steps += 1
            if self._failed_steps > 1:
                self._retried()
        elif self._failed_steps:
            self._failed_steps = 0
            self._retried()

    def entered(self, phase: str) -> None:
        """A phase other than training begins."""
        self.noted(logging.INFO, phase)

    def noted(self, level: int, text: str) -> None:
        """A line for the job's log, without secrets; warnings are in the service's as well."""
        text = redacted(text)
        if level >= logging.WARNING:
            log_note(level, self.record, text)
        self._log.note(level, text)

    def said(self, stream: str, text: str) -> None:
        """Whole lines of what the job's code says, for the log of the run. From any thread."""
        self.run_log.say(stream, text)

    def waiting(self, reason: str | None) -> None:
        """The run waits for lost workers, because of ``reason``, or goes on (``None``)."""
        if reason is not None and self.waits_for is None:
            self.noted(logging.WARNING, reason)
        self.waits_for = reason
        if reason is not None:
            self.workers = ()

    def snapshot(self, step: int, path: Path) -> None:
        """A snapshot is on disk."""
        self.has_snapshot = True
        self.on_snapshot()
        self._log.snapshot(step, path.name)

    async def keep(self) -> None:
        """Return when the losses until now are in the store."""
        await self._log.flush()

    def _write_trace(self, folder: Path) -> None:
        """Write the last steps beside the job's log. Blocks."""
        there = {"trace": folder / TRACE, "timeline": folder / TIMELINE}
        self.trace.write(self.job.override("observe", **there), lambda: self.collector.observer_failed("trace"))


def _share_of(record: JobRecord) -> Share:
    return Share(record.id, weight=record.weight, background=record.is_background)
