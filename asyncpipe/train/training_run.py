"""The training loop as a component: a job in, a summary out, on whatever loop the host runs.

::

    folders, newest snapshot ─▶ the entry makes the workload ─▶ Pipeline ─▶ steps ─▶ evaluation, sample ─▶ summary
                                (in the run's own thread)                  (steps.py)  (evaluation.py)

A run that goes on from a snapshot does the steps that were left, with the numbers that they would have had. Alone it
has devices and random numbers for itself; on a ``DevicePool`` any number of runs share them and do not disturb one
another: each has the losses that it would have had alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from asyncpipe.core.engine.events import Observer
from asyncpipe.core.engine.share import Share
from asyncpipe.core.schedules.protocol import Schedule, Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError
from asyncpipe.observe.metrics import PipelineCollector
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.train.adamw import ClippedAdamW
from asyncpipe.train.batches import BatchPrefetcher, BatchSource
from asyncpipe.train.blocking_calls import DedicatedThread, in_thread
from asyncpipe.train.evaluation import EvaluationResult, evaluate_and_sample
from asyncpipe.train.import_path import import_path
from asyncpipe.train.job_file import AUTO, Job, job_file_error
from asyncpipe.train.planning import choose_for, with_plan
from asyncpipe.train.progress import Meter, NullProgress, ProgressSink, RunStarted, TrainingSummary
from asyncpipe.train.randomness import RunRandom
from asyncpipe.train.schedule_changes import ScheduleChanges
from asyncpipe.train.snapshots.resume import ResumePoint, join, open_folder, with_schedule_of
from asyncpipe.train.snapshots.run_state import RunState, schedule_sha256
from asyncpipe.train.snapshots.writer import SnapshotWriter
from asyncpipe.train.step_failures import StepRetries
from asyncpipe.train.trace_files import TraceRecorder, WrittenFiles, make_folders
from asyncpipe.train.training_loop import StepListeners, TrainingLoop
from asyncpipe.train.workload import Resumable, Workload

__all__ = ["TrainingRun"]

_logger = logging.getLogger(__name__)


class TrainingRun:
    """One run of a job: ``await run()`` once, ``stop()`` from anywhere on the same loop to end it early.

    ``make_workload`` is called in a thread of the run's own. Alone, torch's global generators are seeded before; on a
    ``pool``, what it draws is the same, but those generators are left to everybody. ``share`` says what the run gets
    of the pool's devices. ``progress`` is told how it goes; ``collector`` counts what it does for Prometheus, and
    registering it is the caller's part. ``observers`` are shown every step's record, and those that are
    ``StepListener``s every training step's figures too; one that raises is left out from then on. Where the job's
    ``[snapshots]`` say ``resume``, the run goes on from the newest one.
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
        share: Share | None = None,
    ) -> None:
        self._job = job
        self._make_workload = make_workload
        self._progress: ProgressSink = progress if progress is not None else NullProgress()
        self._collector = collector
        self._recorder = TraceRecorder(job.observe.trace_steps)
        self._observers: list[Observer] = [*([] if collector is None else [collector]), *observers]
        self._pool, self._share = pool, share
        self._random = RunRandom(shared=pool is not None)
        self._changes = ScheduleChanges()
        self._meter = Meter(job.training.steps)
        self._resumed: ResumePoint | None = None
        self._stopping = False

    def stop(self) -> None:
        """Let the run end after the step under way, with a last snapshot; evaluation and sample are left out.

        Before the first step, it ends as soon as what is being made is made; while it waits for a batch, with that.
        """
        self._stopping = True

    async def change_schedule(self, name: str) -> None:
        """Follow another schedule from the next step on, or from the first one; returns when that is settled.

        Snapshots say so from then on. Raises ``ScheduleError``, and nothing is changed, where the schedule is not
        known, would place stages elsewhere or cannot serve the run's shape, or where no more training step follows.
        """
        await self._changes.ask(name)

    async def run(self) -> TrainingSummary:
        """Train, evaluate and sample. Closes the pipeline and writes the trace however it ends.

        Cancellation takes effect between two tasks, or when a thread has made what it is making. Raises
        ``JobFileError`` where the job does not fit the workload, this machine or the snapshots that it is to go on
        from, ``FolderError`` where those cannot be used now, ``OptionError`` where it asks for an extra that is not
        installed, ``DataError`` where its data raises, ``TaskError`` for a task that fails more often than ``[faults]``
        allow (``OutOfMemoryError`` where that was for want of memory), and ``NonFiniteLossError``. A trace or a
        snapshot that cannot be written is logged, counted and noted.
        """
        if self._job.observe.opentelemetry:
            from asyncpipe.observe.otel import StepSpans

            self._observers.append(StepSpans(self._job.name))
        try:
            async with DedicatedThread(f"asyncpipe-{self._job.name}") as thread:
                return await self._run(thread)
        finally:
            self._changes.close()

    async def _run(self, thread: DedicatedThread) -> TrainingSummary:
        await in_thread(self._make_folders)
        if self._resumed is not None:
            self._progress.entered(str(self._resumed))
        workload = await thread.run(self._build)
        learned, written = EvaluationResult(), WrittenFiles()
        snapshot = None if self._resumed is None else self._resumed.path
        if not self._stopping and await self._choose_schedule(workload, thread):
            snapshots = SnapshotWriter(self._job, self._collector, self._resumed, self._progress)
            try:
                async with snapshots:
                    learned = await self._run_pipeline(workload, snapshots, thread)
                snapshot = snapshots.last
            finally:
                written = await in_thread(self._write)
        meter = self._meter
        return TrainingSummary(
            name=self._job.name,
            steps=meter.step,
            stopped=self._stopping,
            loss=meter.loss,
            seconds=meter.seconds,
            tokens_per_second=meter.tokens_per_second,
            bubble_ratio=meter.bubble_ratio,
            **learned._asdict(),
            **written._asdict(),
            snapshot=snapshot,
            skipped=meter.skipped,
        )

    def _make_folders(self) -> None:
        make_folders(self._job)
        self._resumed = open_folder(self._job)
        if self._resumed is not None:
            self._job = with_schedule_of(self._job, self._resumed.parameters)
            self._meter.step = self._resumed.step

    def _write(self) -> WrittenFiles:
        return self._recorder.write(self._job, lambda: self._count_failure("trace"))

    def _count_failure(self, reason: str) -> None:
        if self._collector is not None:
            self._collector.observer_failed(reason)

    def _note(self, level: int, text: str) -> None:
        _logger.log(level, "job %s: %s", self._job.name, text)
        self._progress.noted(level, text)

    def _build(self) -> Workload:
        return self._random.build(self._job.training.seed, self._make_workload)

    async def _choose_schedule(self, workload: Workload, thread: DedicatedThread) -> bool:
        """Measure and plan, if the job leaves the schedule to that; false if the run was stopped meanwhile."""
        if self._job.pipeline.schedule != AUTO:
            return True

        def heed_stop(_: str) -> None:
            if self._stopping:
                raise _Stopped

        self._progress.entered("measuring, to choose a schedule")
        try:
            plan = await thread.run(lambda: choose_for(self._job, workload, progress=heed_stop))
        except _Stopped:
            return False
        self._job = with_plan(self._job, plan)
        self._progress.entered(f"chosen: {plan}; predicted {plan.seconds * 1e3:.0f} ms a step")
        return True

    async def _run_pipeline(
        self, workload: Workload, snapshots: SnapshotWriter, thread: DedicatedThread
    ) -> EvaluationResult:
        # In a thread: to lower large graphs, and to bring a model to its devices, takes a while.
        async with await thread.run(lambda: self._pipeline(workload)) as pipe:
            self._progress.started(self._description(pipe))
            await self._train(pipe, workload, snapshots, thread)
            # What follows is no training: it would bend the operator's view of bubbles and durations.
            pipe.observers.clear()
            return await evaluate_and_sample(
                pipe,
                workload,
                self._job.training.batch_size,
                thread=thread,
                random=self._random,
                progress=self._progress,
                stopping=lambda: self._stopping,
            )

    def _pipeline(self, workload: Workload) -> Pipeline:
        table, observe = self._job.pipeline, self._job.observe
        recorders = [self._recorder] if observe.trace or observe.timeline else []
        try:
            return Pipeline(
                workload.model,
                table.devices,
                microbatches=table.microbatches,
                balance=table.balance,
                stages=table.stages,
                schedule=self._find_schedule(table.schedule),
                checkpoint=table.checkpoint,
                loss_fn=workload.loss_fn,
                observers=[*recorders, *self._observers],
                nvtx=observe.nvtx,
                sample_memory=observe.trace is not None,
                pool=self._pool,
                share=self._share,
                generator=self._random.generator,
            )
        except OptionError as error:
            raise job_file_error(self._job.path, f"pipeline: {error}") from error

    def _find_schedule(self, name: str) -> Schedule:
        with import_path(self._job.path.resolve().parent):
            return find_schedule(name, order=self._job.pipeline.order)

    def _description(self, pipe: Pipeline) -> RunStarted:
        return RunStarted(
            name=self._job.name,
            steps=self._job.training.steps,
            parameters=sum(parameter.numel() for parameter in pipe.parameters()),
            devices=self._job.pipeline.devices,
        )

    # Training

    async def _train(
        self, pipe: Pipeline, workload: Workload, snapshots: SnapshotWriter, thread: DedicatedThread
    ) -> None:
        job = self._job
        pipe.train()
        only_finite = job.faults.non_finite != "ignore"
        # The first optimizer of a process imports torch's compiler, which takes seconds.
        updater = await thread.run(lambda: ClippedAdamW(pipe.parameters(), job.training, only_finite=only_finite))
        data = await thread.run(lambda: self._data(workload))
        feed = BatchPrefetcher(thread, data, self._random)
        own: dict[str, Resumable] = {"model": pipe, "optimizer": updater}
        states = join(own, workload.states, RunState(self._meter, feed), job)
        await self._go_on(pipe, states, snapshots, thread)
        steps = TrainingLoop(
            job,
            pipe,
            feed=feed,
            attempts=StepRetries(pipe, job.faults, self._random, feed, self._note),
            updater=updater,
            meter=self._meter,
            tokens_per_sample=workload.tokens_per_sample,
            listeners=StepListeners(self._observers, self._count_failure),
            progress=self._progress,
            note=self._note,
        )
        await steps.run(
            snapshots,
            states,
            stopping=lambda: self._stopping,
            at_border=lambda: self._changes.make(lambda name: self._change_schedule(name, pipe, snapshots)),
        )
        self._changes.close()

    def _data(self, workload: Workload) -> BatchSource:
        with self._random.drawing():
            return BatchSource(workload, self._job.training, lambda: self._stopping)

    async def _go_on(
        self, pipe: Pipeline, states: dict[str, Resumable], snapshots: SnapshotWriter, thread: DedicatedThread
    ) -> None:
        """Put back what the run goes on from, if there is something, and let snapshots say what follows."""
        follows = await self._describe_schedule(pipe, snapshots)
        resumed = self._resumed
        if resumed is None:
            return
        pipeline = self._job.model_dump(mode="json", include={"pipeline"})["pipeline"]
        if resumed.parameters.get("pipeline") == pipeline and resumed.schedule_sha256 not in (None, follows):
            _logger.warning(
                "the schedule %r does its tasks in another order than when %s was written: sums may be rounded "
                "otherwise, losses differ in their last digits",
                self._job.pipeline.schedule,
                resumed.path,
            )
        await thread.run(lambda: resumed.restore(states, self._job))

    async def _describe_schedule(self, pipe: Pipeline, snapshots: SnapshotWriter) -> str:
        """Let snapshots say what the pipeline follows; returns its hash."""
        shape = Shape(len(pipe.stages), pipe.microbatches, len(pipe.devices))
        follows = await in_thread(lambda: schedule_sha256(pipe.schedule, shape))
        snapshots.describe(self._job, schedule_sha256=follows)
        return follows

    async def _change_schedule(self, name: str, pipe: Pipeline, snapshots: SnapshotWriter) -> None:
        """Between two steps. In a thread: finding it may import a module, and lowering takes a while."""
        order = self._job.pipeline.order
        await in_thread(lambda: pipe.change_schedule(self._find_schedule(name), order=order))
        self._job = self._job.override("pipeline", schedule=name)
        await self._describe_schedule(pipe, snapshots)
        self._note(logging.INFO, f"the schedule is {name} from step {self._meter.step + 1} on")


class _Stopped(Exception):
    """Ends a measurement, which nobody else can ask to."""
