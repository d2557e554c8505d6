"""One attempt at a job, as a component: a ``Job`` in, a ``TrainingSummary`` out, on any event loop.

::

    folders, newest snapshot ─▶ the entry makes the workload ─▶ Pipeline ─▶ steps ───────────▶ evaluation, sample
                                (in the run's own thread)                  (training_loop.py)  (evaluation.py)

A run that resumes does the remaining steps with the numbers that they would have had without the interruption. Without
a ``DevicePool``, a run has its devices and the process's random generators for itself. On a pool, runs share devices
without influencing one another's results: each has the losses that it would have alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from asyncpipe.core.records.compilations import CompiledStage
from asyncpipe.core.records.step_record import Observer
from asyncpipe.core.schedules.protocol import Schedule, Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import DeviceError
from asyncpipe.observe.metrics import PipelineCollector
from asyncpipe.observe.scalars import RunEnd, ScalarObserver
from asyncpipe.ops.device.caller_streams import CallerStreams
from asyncpipe.ops.model.feed import Feed
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.pipeline.workers import assign_workers
from asyncpipe.train.adamw import ClippedAdamW, StagedAdamW
from asyncpipe.train.batches import BatchPrefetcher, BatchSource
from asyncpipe.train.blocking_calls import DedicatedThread, in_thread
from asyncpipe.train.evaluation import evaluate, sample_text
from asyncpipe.train.import_path import import_path
from asyncpipe.train.job_file import AUTO, Job, blaming_key, check_workers, job_file_error
from asyncpipe.train.next_move import loss_of
from asyncpipe.train.overlapping_loop import OverlappingSteps
from asyncpipe.train.planning import choose_for, with_plan
from asyncpipe.train.progress import Meter, ProgressSink, RunStarted, StepListener, StepProgress, TrainingSummary
from asyncpipe.train.randomness import RunRandom
from asyncpipe.train.redaction import redacted
from asyncpipe.train.run_orders import RunOrders
from asyncpipe.train.scalars import scalar_observers, scalars_of
from asyncpipe.train.snapshots.resume import ResumePoint, named_states, open_folder, with_chosen_schedule
from asyncpipe.train.snapshots.run_state import RunState, schedule_sha256
from asyncpipe.train.snapshots.stages_in_workers import StagesInWorkers
from asyncpipe.train.snapshots.writer import SnapshotWriter
from asyncpipe.train.step_failures import StepRetries
from asyncpipe.train.trace_files import TraceRecorder, WrittenFiles, make_folders
from asyncpipe.train.training_loop import AHEAD, StepByStep, TrainingLoop
from asyncpipe.train.workload import Resumable, Workload

__all__ = ["TrainingRun"]

_logger = logging.getLogger(__name__)


class TrainingRun:
    """One attempt at a job, which ends when it loses a worker: ``await run()`` once; ``orders.stop()`` ends it early.

    ``make_workload`` is called in the run's dedicated thread. Without a ``pool``, torch's global generators are seeded
    before; on a ``pool``, the workload draws the same numbers, but from a generator of the run. ``orders`` are what is
    asked of the run meanwhile. ``progress`` is told how the run proceeds. ``collector`` counts for Prometheus; the
    caller registers it. ``observers`` get each step's record, and the ``StepListener``s among them the figures of each
    training step; one that raises is removed. If ``[snapshots]`` has ``resume``, the run continues from the newest one.
    Raises ``JobFileError`` for a job whose stages would live in workers and be updated here.
    """

    def __init__(
        self,
        job: Job,
        make_workload: Callable[[], Workload],
        *,
        progress: ProgressSink | None = None,
        collector: PipelineCollector | None = None,
        observers: Sequence[Observer] = (),
        pool: DevicePool | None = None,
        orders: RunOrders | None = None,
        shared: bool = True,
        place: Callable[[Job, Workload], Job] | None = None,
    ) -> None:
        """``shared``: whether others use the ``pool``, too. ``place`` puts the job on other devices, in the thread.

        Who gives ``orders`` closes them.
        """
        self._in_workers = job.pipeline.workers != "threads" if pool is None else pool.workers is not None
        if self._in_workers:
            try:
                check_workers("processes", job.training)
            except ValueError as error:
                raise job_file_error(job.path, str(error)) from None
        self._job = job
        self._make_workload = make_workload
        self._streams = CallerStreams(["cpu"]) if self._in_workers else _streams_for(job)
        self._thread = DedicatedThread(f"asyncpipe-{job.name}", self._streams.current)
        self._progress = progress if progress is not None else ProgressSink()
        self._collector = collector
        self._recorder = TraceRecorder(job.observe.trace_steps)
        self._observers: list[Observer] = [*([] if collector is None else [collector]), *observers]
        self._pool = pool
        self.orders = RunOrders() if orders is None else orders
        self._closes_orders = orders is None
        self._share = self.orders.share
        self._pipe: Pipeline | None = None
        """While it trains."""
        self._place = place
        self._random = RunRandom(shared=pool is not None and shared)
        self._meter = Meter(job.training.steps)
        self._compiled: tuple[CompiledStage, ...] = ()
        self._resumed: ResumePoint | None = None
        self._scalars: Sequence[ScalarObserver] = ()
        self.is_handed_over = False
        """Whether it was told to end for another attempt."""
        self._finished: Path | None = None
        self.saved = 0
        """How many snapshots it has put on disk."""

    @property
    def job(self) -> Job:
        """The job, with the schedule that the run has chosen or changed to."""
        return self._job

    def hand_over(self) -> None:
        """End after the step, as when stopped, but leave the orders open: the next attempt goes on with them."""
        self.is_handed_over = True

    @property
    def _keeps_going(self) -> bool:
        """Whether the loss of a worker is to cost no step, since other replicas have what it had."""
        table = self._job.pipeline
        shrinks = self._job.faults.lost_host == "shrink"
        return shrinks and self._in_workers and table.replicas > 1 and not table.shard_optimizer

    def _is_stopping(self) -> bool:
        return self.is_handed_over or self.orders.stopping

    def _look_at_share(self) -> None:
        if (share := self.orders.share) is None or share == self._share:
            return
        if self._in_workers:
            self._note(logging.INFO, "its weight and class count from its next run on, since its stages are in workers")
        elif self._pipe is not None:
            self._pipe.change_share(share)
        else:
            return  # It is looked at again when the pipeline is made.
        self._share = share

    async def run(self) -> TrainingSummary:
        """Train, evaluate and sample. However the run ends, it closes the pipeline and writes the trace.

        A cancellation takes effect between two tasks, or after a call in a thread has returned. Raises

        - ``JobFileError`` if the job does not fit the workload, this machine or the snapshots to resume from,
        - ``FolderError`` if the folder of snapshots cannot be used now,
        - ``OptionError`` if the job needs an extra that is not installed,
        - ``DataError`` if the job's data raises,
        - ``TaskError`` for a task that fails more often than ``[faults]`` allow, or ``OutOfMemoryError`` in its place,
        - ``NonFiniteLossError`` if the loss is not finite and ``[faults]`` do not allow that.

        A trace or a snapshot that cannot be written is logged, reported and counted, but does not end the run.
        """
        if self._job.observe.opentelemetry:
            from asyncpipe.observe.otel import StepSpans

            self._observers.append(StepSpans(self._job.name))
        unwatch = self.orders.watch(self._look_at_share)
        try:
            async with self._thread:
                return await self._streams.run(self._run())
        finally:
            unwatch()
            if self._closes_orders:
                self.orders.close()
            if self._pool is None:
                with suppress(RuntimeError):  # A device that has failed; the error that ends the run says more.
                    self._streams.join()

    async def _run(self) -> TrainingSummary:
        await in_thread(self._open_folders)
        begun = self._meter.step
        self._scalars = await in_thread(lambda: scalar_observers(self._job, begun, self._count_failure))
        end: RunEnd = "failed"
        try:
            summary = await self._run_job()
            end = "killed" if summary.stopped else "finished"
            return summary
        except asyncio.CancelledError:
            end = "killed"
            raise
        finally:
            for observer in self._scalars:
                await in_thread(partial(observer.close, end))

    def _stepped(self, progress: StepProgress) -> None:
        self._progress.stepped(progress)
        for observer in self._scalars:
            observer.add(progress.step, scalars_of(progress))

    async def _run_job(self) -> TrainingSummary:
        if self._resumed is not None:
            self._progress.entered(str(self._resumed))
        workload = await self._thread.run(lambda: self._random.build(self._job.training.seed, self._make_workload))
        if (place := self._place) is not None:
            self._job = await self._thread.run(lambda: place(self._job, workload))
        evaluation = sample = None
        written = WrittenFiles()
        snapshot = None if self._resumed is None else self._resumed.path
        if not self._is_stopping() and await self._choose_schedule(workload):
            snapshots = SnapshotWriter(self._job, self._collector, self._resumed, self._progress, self._count_saved)
            try:
                evaluation, sample = await self._run_pipeline(workload, snapshots)
                snapshot = snapshots.last
            finally:
                written = await in_thread(lambda: self._recorder.write(self._job, lambda: self._count_failure("trace")))
        meter = self._meter
        return TrainingSummary(
            name=self._job.name,
            steps=meter.step,
            stopped=self._is_stopping(),
            loss=meter.loss,
            seconds=meter.seconds,
            tokens_per_second=meter.tokens_per_second,
            bubble_ratio=meter.bubble_ratio,
            evaluation=evaluation,
            sample=sample,
            **written._asdict(),
            snapshot=snapshot,
            skipped=meter.skipped,
            finished=self._finished,
            compiled=self._compiled,
        )

    def _open_folders(self) -> None:
        make_folders(self._job)
        self._resumed = open_folder(self._job, mapped=self._in_workers)
        if self._resumed is not None:
            self._job = with_chosen_schedule(self._job, self._resumed.manifest)
            self._meter.step = self._resumed.step

    def _count_failure(self, reason: str) -> None:
        if self._collector is not None:
            self._collector.observer_failed(reason)

    def _count_saved(self) -> None:
        self.saved += 1

    def _note(self, level: int, text: str) -> None:
        _logger.log(level, "job %s: %s", self._job.name, redacted(text))
        self._progress.noted(level, text)

    async def _choose_schedule(self, workload: Workload) -> bool:
        """Choose a schedule by measurement if the job asks for that; false if the run was stopped meanwhile."""
        if self._job.pipeline.schedule != AUTO:
            return True

        def check_stop(_: str) -> None:
            if self._is_stopping():
                raise _MeasurementStopped

        self._progress.entered("measuring, to choose a schedule")
        try:
            plan = await self._thread.run(
                lambda: choose_for(self._job, workload, ahead=int(self._job.training.overlap), progress=check_stop)
            )
        except _MeasurementStopped:
            return False
        self._job = with_plan(self._job, plan)
        self._progress.entered(f"chosen: {plan}; predicted {plan.seconds * 1e3:.0f} ms a step")
        return True

    async def _run_pipeline(self, workload: Workload, snapshots: SnapshotWriter) -> tuple[float | None, str | None]:
        """Train; returns the held-out loss and the sample, ``None`` without one or if the run was stopped."""
        if self._in_workers and self._pool is None:
            self._progress.entered("starting workers")
        # In a thread: lowering a large graph and moving a model to its devices take a while.
        staged = StagedAdamW(self._job.training) if self._job.training.overlap else None
        # The pipeline closes last: its workers may write a snapshot.
        async with await self._thread.run(lambda: self._pipeline(workload, staged)) as pipe, snapshots:
            self._progress.started(
                RunStarted(
                    name=self._job.name,
                    steps=self._job.training.steps,
                    parameters=sum(parameter.numel() for parameter in pipe.module.parameters()),
                    devices=self._job.pipeline.devices,
                    replicas=self._job.pipeline.replicas,
                    workers=self._workers_of(pipe),
                    done=self._meter.step,
                )
            )
            if self._job.pipeline.compile:
                self._progress.entered("compiling stages")
            self._pipe = pipe
            if not self._in_workers:
                self._look_at_share()  # It may have changed while the pipeline was made.
            try:
                await self._train(pipe, workload, staged, snapshots)
            finally:
                self._compiled = pipe.compiled
                self._pipe = None
            # Steps of the evaluation would distort the metrics of bubbles and durations.
            pipe.observers.clear()
            pipe.eval()
            evaluation = sample = None
            if (held_out := workload.held_out) is not None and not self._is_stopping():
                self._progress.entered("evaluating")
                batches = partial(held_out, self._job.training.batch_size)
                evaluation = await evaluate(
                    pipe, batches, self._thread, self._random, self._is_stopping, workload.weight
                )
            if workload.sample is not None and not self._is_stopping():
                self._progress.entered("sampling")
                sample = await self._random.drawn_by(sample_text(pipe, workload.sample, self._is_stopping))
            if (finish := workload.finish) is not None and not self._is_stopping():
                self._progress.entered("writing the model")
                with blaming_key(self._job, "job.parameters"):
                    self._finished = await in_thread(lambda: finish(pipe))
            return evaluation, sample

    def _pipeline(self, workload: Workload, staged: StagedAdamW | None) -> Pipeline:
        table, observe = self._job.pipeline, self._job.observe
        recorders = [self._recorder] if observe.trace or observe.timeline else []
        own: dict[str, Any] = {}
        if self._in_workers and self._pool is None:
            folder = str(self._job.path.resolve().parent)
            own = {"workers": self._job.pool_workers(), "transport": table.transport, "worker_path": [folder]}
        with blaming_key(self._job, "pipeline"):
            return Pipeline(
                workload.model,
                table.devices,
                replicas=table.replicas,
                microbatches=table.microbatches,
                total_microbatches=table.total_microbatches,
                balance=table.balance,
                stages=table.stages,
                schedule=self._find_schedule(table.schedule),
                checkpoint=table.checkpoint,
                offload=table.offload,
                loss_fn=workload.loss_fn,
                on_nan="ignore",  # ``faults.non_finite`` says what becomes of one.
                optimizer=None if staged is None else staged.make,
                shard_optimizer=table.shard_optimizer,
                gradient_dtype=table.gradient_dtype,
                undo_updates=self._keeps_going and staged is not None,
                gradient_norms=staged is not None and self._job.training.clip is None,
                clip_grad_norm=None if staged is None else self._job.training.clip,
                feed=workload.batches if isinstance(workload.batches, Feed) else None,
                observers=[*recorders, *self._observers],
                compile=table.compile,
                flops=workload.flops,
                peak_flops=observe.peak_flops,
                nvtx=observe.nvtx,
                sample_memory=observe.trace is not None,
                pool=self._pool,
                share=self._share,
                **own,
                generator=self._random.generator,
            )

    def _workers_of(self, pipe: Pipeline) -> tuple[str, ...]:
        if not self._in_workers:
            return ()
        pool = None if self._pool is None else self._pool.workers
        worker_of = (
            assign_workers(pipe.devices, self._job.pipeline.workers) if pool is None else pool.worker_of(pipe.devices)
        )
        return tuple(dict.fromkeys(worker_of.values()))

    def _find_schedule(self, name: str) -> Schedule:
        with import_path(self._job.path.resolve().parent):
            return find_schedule(name, order=self._job.pipeline.order)

    # Training

    async def _train(
        self, pipe: Pipeline, workload: Workload, staged: StagedAdamW | None, snapshots: SnapshotWriter
    ) -> None:
        job = self._job
        pipe.train()
        # Skipping an update restores buffers, so the host must know of it before the next step.
        on_accelerators = all(device.is_accelerator for device in pipe.devices)
        ahead = AHEAD if on_accelerators and job.faults.non_finite != "skip" else 0
        optimizer: ClippedAdamW | StagedAdamW
        if staged is None:
            # In a thread: the first optimizer of a process imports torch's compiler, which takes seconds.
            optimizer = await self._thread.run(lambda: self._optimizer(pipe, checks_on_device=ahead > 0))
        else:
            staged.attach(pipe)
            optimizer = staged
        source = await self._thread.run(lambda: self._source(workload))
        batches = BatchPrefetcher(self._thread, source, self._random)
        own: dict[str, Resumable] = {"model": pipe, "optimizer": optimizer}
        stages = None
        if pipe.remote is not None and staged is not None:
            own, stages = {}, StagesInWorkers(pipe.remote, staged)
            snapshots.leave_to(stages)
            if self._keeps_going:
                # The first optimizer of a process imports torch's compiler, which takes seconds: not after a loss.
                await self._thread.run(staged.settings_dict)
        states = named_states(own, workload.states, RunState(self._meter, batches), job)
        await self._restore(pipe, states, stages, snapshots)
        pipe.feed_step = self._meter.step
        make: Callable[..., TrainingLoop] = OverlappingSteps if staged is not None else StepByStep
        loop = make(
            job=job,
            pipe=pipe,
            batches=batches,
            retries=StepRetries(pipe, job.faults, self._random, batches, self._note),
            optimizer=optimizer,
            meter=self._meter,
            tokens_per_sample=workload.tokens_per_sample,
            listeners=[observer for observer in self._observers if isinstance(observer, StepListener)],
            listener_failed=self._count_failure,
            stepped=self._stepped,
            note=self._note,
            snapshots=snapshots,
            states=states,
            orders=self.orders,
            stopping=self._is_stopping,
            change=partial(self._change_schedule, pipe, snapshots),
            ahead=ahead,
        )
        self._note_overlap(pipe)
        try:
            await loop.run()
        except Exception as error:
            if self._keeps_going and loss_of(error) is not None and stages is not None and stages.are_left:
                self._note(
                    logging.INFO, f"other replicas have what was lost; it is kept as after step {self._meter.step}"
                )
                await snapshots.after_loss(self._meter.step, loop.states_after_last_step())
            raise
        if not self.is_handed_over:
            self.orders.close()

    def _optimizer(self, pipe: Pipeline, *, checks_on_device: bool) -> ClippedAdamW:
        only_finite = self._job.faults.non_finite != "ignore"
        return ClippedAdamW(
            pipe.parameters(), self._job.training, only_finite=only_finite, checks_on_device=checks_on_device
        )

    def _note_overlap(self, pipe: Pipeline) -> None:
        if self._job.training.overlap and (reason := pipe.why_steps_wait) is not None:
            self._note(logging.INFO, f"training.overlap: steps run one by one: {reason}")

    def _source(self, workload: Workload) -> BatchSource:
        with self._random.drawing():
            return BatchSource(workload, self._job.training, self._is_stopping)

    async def _restore(
        self,
        pipe: Pipeline,
        states: dict[str, Resumable],
        stages: StagesInWorkers | None,
        snapshots: SnapshotWriter,
    ) -> None:
        """Restore the states, if the run resumes, and prepare the description for later snapshots."""
        identity = await self._describe_schedule(pipe, snapshots)
        resumed = self._resumed
        if resumed is None:
            return
        if resumed.has_pipeline_of(self._job) and resumed.manifest.schedule_sha256 not in (None, identity):
            _logger.warning(
                "the schedule %r orders its tasks differently than when %s was written: sums may be rounded "
                "differently, and losses differ in their last digits",
                self._job.pipeline.schedule,
                resumed.path,
            )
        await self._thread.run(lambda: resumed.restore(states, self._job, stages))

    async def _describe_schedule(self, pipe: Pipeline, snapshots: SnapshotWriter) -> str:
        """Let later snapshots name the pipeline's schedule; returns its SHA-256."""
        rows = self._job.pipeline.replicas  # Each has the schedule for itself.
        shape = Shape(len(pipe.stages) // rows, pipe.microbatches, len(pipe.devices) // rows)
        identity = await in_thread(lambda: schedule_sha256(pipe.schedule, shape))
        snapshots.describe(self._job, identity)
        return identity

    async def _change_schedule(self, pipe: Pipeline, snapshots: SnapshotWriter, name: str) -> None:
        """Change the schedule between two steps. In a thread: finding it may import a module, and lowering is slow."""
        order = self._job.pipeline.order
        await in_thread(lambda: pipe.change_schedule(self._find_schedule(name), order=order))
        self._job = self._job.override("pipeline", schedule=name)
        await self._describe_schedule(pipe, snapshots)
        self._note(logging.INFO, f"the schedule is {name} from step {self._meter.step + 1} on")
        self._note_overlap(pipe)


def _streams_for(job: Job) -> CallerStreams:
    """The run's own streams: on a pool, runs that share the default stream would wait for one another's steps."""
    try:
        return CallerStreams(job.pipeline.devices)
    except DeviceError:  # The pipeline will say which key of the job is wrong.
        return CallerStreams(["cpu"])


class _MeasurementStopped(Exception):
    """Ends a measurement from its progress callback, because the run was stopped."""
