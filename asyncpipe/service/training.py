"""The training loop as a component: a job in, a summary out, on whatever loop the host runs.

One step, walked: make the batch → ``pipe.step`` (forward and backward, task by task) → clip, AdamW, in a
thread → tell the listeners and the progress sink → copy the state, where a snapshot is due. Between steps the loop is
free for everything else; whoever watches the run cannot end it. A run that goes on from a snapshot does the steps that
were left, with the numbers that they would have had.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from math import cos, inf, pi
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncpipe.core.events import Observer
from asyncpipe.core.registry import find_schedule
from asyncpipe.core.schedule import Shape
from asyncpipe.errors import OptionError
from asyncpipe.observe.metrics import PipelineCollector
from asyncpipe.pipeline import Pipeline
from asyncpipe.service.paths import importable
from asyncpipe.service.planning import choose_for, with_plan
from asyncpipe.service.progress import (
    Meter,
    NullProgress,
    ProgressSink,
    RunStarted,
    StepListener,
    StepProgress,
    TrainingSummary,
)
from asyncpipe.service.recording import Recorder, Written, make_folders
from asyncpipe.service.resume import Resumed, join, open_folder, with_schedule_of
from asyncpipe.service.run_state import Data, RunState, schedule_sha256
from asyncpipe.service.settings import AUTO, Job, Training, job_file_error
from asyncpipe.service.snapshots import Snapshots
from asyncpipe.service.threads import in_thread
from asyncpipe.service.workload import Batch, Resumable, Workload

__all__ = ["TrainingRun", "learning_rate"]

_logger = logging.getLogger(__name__)

BETAS = (0.9, 0.95)
"""As is usual for transformers: the second moment forgets within some 20 steps."""


class TrainingRun:
    """One run of a job: ``await run()`` once, ``stop()`` from anywhere on the same loop to end it early.

    ``make_workload`` is called in a thread, with torch's global generator seeded. ``progress`` is told how it
    goes; ``collector`` counts what it does for Prometheus, and registering it is the caller's part. ``observers`` are
    shown every step's record, and those that are ``StepListener``s every training step's figures too; one that raises
    is left out from then on. Where the job's ``[snapshots]`` say ``resume``, the run goes on from the newest one.
    """

    def __init__(
        self,
        job: Job,
        make_workload: Callable[[], Workload],
        *,
        progress: ProgressSink | None = None,
        collector: PipelineCollector | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._job = job
        self._make_workload = make_workload
        self._progress: ProgressSink = progress if progress is not None else NullProgress()
        self._collector = collector
        self._recorder = Recorder(job.observe.trace_steps)
        self._observers: list[Observer] = [*([] if collector is None else [collector]), *observers]
        self._listeners = [observer for observer in self._observers if isinstance(observer, StepListener)]
        self._meter = Meter(job.training.steps)
        self._resumed: Resumed | None = None
        self._stopping = False

    def stop(self) -> None:
        """Let the run end after the step under way, with a last snapshot; evaluation and sample are left out."""
        self._stopping = True

    async def run(self) -> TrainingSummary:
        """Train, evaluate and sample. Closes the pipeline and writes the trace however it ends.

        Cancellation takes effect between two tasks. Raises ``JobFileError`` where the job does not fit the
        workload, this machine or the snapshots that it is to go on from, ``OptionError`` where it asks for an extra
        that is not installed, ``TaskError`` for the first task that fails. A trace or a snapshot that cannot be
        written is logged and counted.
        """
        if self._job.observe.opentelemetry:
            from asyncpipe.observe.otel import StepSpans

            self._observers.append(StepSpans(self._job.name))
        await in_thread(self._make_folders)
        if self._resumed is not None:
            self._progress.entered(str(self._resumed))
        workload = await in_thread(self._build)
        learned, written, snapshot = _Learned(), Written(), None
        if await self._choose_schedule(workload):
            try:
                async with Snapshots(self._job, self._collector, self._resumed) as snapshots:
                    learned = await self._run_pipeline(workload, snapshots)
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
        )

    def _make_folders(self) -> None:
        make_folders(self._job)
        self._resumed = open_folder(self._job)
        if self._resumed is not None:
            self._job = with_schedule_of(self._job, self._resumed.parameters)

    def _write(self) -> Written:
        return self._recorder.write(self._job, lambda: self._count_failure("trace"))

    def _count_failure(self, reason: str) -> None:
        if self._collector is not None:
            self._collector.observer_failed(reason)

    def _build(self) -> Workload:
        torch.manual_seed(self._job.training.seed)
        return self._make_workload()

    async def _choose_schedule(self, workload: Workload) -> bool:
        """Measure and plan, if the job leaves the schedule to that; false if the run was stopped meanwhile."""
        if self._job.pipeline.schedule != AUTO:
            return True

        def heed_stop(_: str) -> None:
            if self._stopping:
                raise _Stopped

        self._progress.entered("measuring, to choose a schedule")
        try:
            plan = await in_thread(lambda: choose_for(self._job, workload, progress=heed_stop))
        except _Stopped:
            return False
        self._job = with_plan(self._job, plan)
        self._progress.entered(f"chosen: {plan}; predicted {plan.seconds * 1e3:.0f} ms a step")
        return True

    async def _run_pipeline(self, workload: Workload, snapshots: Snapshots) -> _Learned:
        async with self._pipeline(workload) as pipe:
            self._progress.started(self._description(pipe))
            await self._train(pipe, workload, snapshots)
            pipe.eval()
            # What follows is no training: it would bend the operator's view of bubbles and durations.
            pipe.observers.clear()
            evaluation = await self._evaluate(pipe, workload)
            return _Learned(evaluation, await self._sample(pipe, workload))

    def _pipeline(self, workload: Workload) -> Pipeline:
        table, observe = self._job.pipeline, self._job.observe
        try:
            with importable(self._job.path.resolve().parent):
                schedule = find_schedule(table.schedule, order=table.order)
            return Pipeline(
                workload.model,
                table.devices,
                microbatches=table.microbatches,
                balance=table.balance,
                stages=table.stages,
                schedule=schedule,
                checkpoint=table.checkpoint,
                loss_fn=workload.loss_fn,
                observers=[self._recorder, *self._observers],
                nvtx=observe.nvtx,
                sample_memory=observe.trace is not None,
            )
        except OptionError as error:
            raise job_file_error(self._job.path, f"pipeline: {error}") from error

    def _description(self, pipe: Pipeline) -> RunStarted:
        return RunStarted(
            name=self._job.name,
            steps=self._job.training.steps,
            parameters=sum(parameter.numel() for parameter in pipe.parameters()),
            devices=self._job.pipeline.devices,
        )

    # Steps

    async def _train(self, pipe: Pipeline, workload: Workload, snapshots: Snapshots) -> None:
        training = self._job.training
        pipe.train()
        updater = _Updater(pipe.parameters(), training)
        data = Data(workload, training, lambda: self._stopping)
        own: dict[str, Resumable] = {"model": pipe, "optimizer": updater}
        states = join(own, workload.states, RunState(self._meter, data), self._job)
        await self._go_on(pipe, states, snapshots)
        while self._meter.step < training.steps and not self._stopping:
            start = perf_counter()
            batch = data.next()
            if batch is None:
                break
            await self._step(pipe, batch, workload.tokens_per_sample, updater, start)
            await snapshots.after_step(self._meter.step, states)
        await snapshots.after_last_step(self._meter.step, states)

    async def _go_on(self, pipe: Pipeline, states: dict[str, Resumable], snapshots: Snapshots) -> None:
        """Put back what the run goes on from, if there is something, and let snapshots say what follows."""
        shape = Shape(len(pipe.stages), pipe.microbatches, len(pipe.devices))
        follows = await in_thread(lambda: schedule_sha256(pipe.schedule, shape))
        snapshots.describe(schedule_sha256=follows)
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
        await in_thread(lambda: resumed.restore(states, self._job))

    async def _step(
        self, pipe: Pipeline, batch: Batch, tokens_per_sample: int, updater: _Updater, start: float
    ) -> None:
        x, target = batch
        result = await pipe.step(x, target, return_outputs=False)
        assert result.loss is not None
        rate = learning_rate(self._meter.step, self._job.training)
        # In a thread: on a CPU the update takes a while, and on a GPU reading the loss waits for the device.
        loss, norm = await in_thread(lambda: updater.update(rate, result.loss))
        await result.completed()
        progress = self._meter.add(
            loss=loss,
            learning_rate=rate,
            gradient_norm=norm,
            seconds=perf_counter() - start,
            samples=len(x),
            tokens=len(x) * tokens_per_sample,
            report=result.report,
        )
        self._tell_listeners(progress)
        self._progress.stepped(progress)

    def _tell_listeners(self, progress: StepProgress) -> None:
        for listener in tuple(self._listeners):
            try:
                listener.training_step(progress.loss, progress.samples, progress.tokens, progress.seconds)
            except Exception:
                _logger.exception("listener %r failed and is removed", listener)
                self._listeners = [other for other in self._listeners if other is not listener]
                self._count_failure("raised")

    # What the model has learned

    async def _evaluate(self, pipe: Pipeline, workload: Workload) -> float | None:
        """Mean loss over the held-out batches, weighted by their sizes."""
        if workload.held_out is None or self._stopping:
            return None
        self._progress.entered("evaluating")
        total = samples = 0.0
        for x, target in workload.held_out(self._job.training.batch_size):
            result = await pipe.step(x, target, return_outputs=False)
            assert result.loss is not None
            total += await in_thread(result.loss.item) * len(x)
            samples += len(x)
            if self._stopping:
                return None
        return total / samples if samples else None

    async def _sample(self, pipe: Pipeline, workload: Workload) -> str | None:
        if workload.sample is None or self._stopping:
            return None
        self._progress.entered("sampling")

        async def forward(x: Tensor) -> Tensor:
            if self._stopping:
                raise _Stopped
            outputs: Tensor = (await pipe.step(x)).outputs
            return outputs

        try:
            return await workload.sample(forward)
        except _Stopped:
            return None


class _Learned(NamedTuple):
    """What the model shows when it is trained."""

    evaluation: float | None = None
    sample: str | None = None


class _Stopped(Exception):
    """Ends a sampler or a measurement, which nobody else can ask to."""


def learning_rate(step: int, training: Training) -> float:
    """The rate of ``step``, from 0: a linear warm-up to the highest one, then half a cosine towards 0."""
    warmup = min(training.warmup_steps, training.steps)
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(training.steps - warmup, 1)
    return training.learning_rate * 0.5 * (1 + cos(pi * done))


class _Updater:
    """AdamW and clipping; used by one thread at a time."""

    def __init__(self, parameters: Iterable[nn.Parameter], training: Training) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._clip = training.clip if training.clip is not None else inf
        # Norms and biases are left out of weight decay, as is usual: decay is there to keep products small.
        matrices = [parameter for parameter in self._parameters if parameter.dim() > 1]
        others = [parameter for parameter in self._parameters if parameter.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": training.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW([group for group in groups if group["params"]], betas=BETAS, fused=True)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the optimizer's moments from ``state``; the job's own settings stay, as it may have other ones now."""
        own = [{key: value for key, value in group.items() if key != "params"} for group in self._groups]
        self.optimizer.load_state_dict(state)
        for group, settings in zip(self._groups, own, strict=True):
            group.update(settings)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def update(self, rate: float, loss: Tensor | None) -> tuple[float, float]:
        """Move the weights along their gradients and clear these; returns ``loss`` and the gradient norm as numbers."""
        assert loss is not None
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), norm.item()
