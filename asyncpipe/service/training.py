"""The training loop as a component: a job in, a summary out, on whatever loop the host runs.

One step, walked: make the batch → ``pipe.step`` (forward and backward, task by task) → clip, AdamW, in a
thread → tell the collector and the progress sink. Between steps the loop is free for everything else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from math import cos, inf, pi
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor, nn

from asyncpipe.core.events import StepRecord
from asyncpipe.core.registry import find_schedule
from asyncpipe.errors import OptionError
from asyncpipe.observe.metrics import PipelineCollector
from asyncpipe.observe.svg import svg_timeline
from asyncpipe.observe.trace import write_trace
from asyncpipe.pipeline import Pipeline
from asyncpipe.runtime.waiting import outlast
from asyncpipe.service.paths import importable
from asyncpipe.service.planning import choose_for, with_plan
from asyncpipe.service.progress import Meter, NullProgress, ProgressSink, RunStarted, TrainingSummary
from asyncpipe.service.settings import AUTO, Job, Observe, Training, job_file_error
from asyncpipe.service.workload import Batch, Workload

__all__ = ["TrainingRun", "learning_rate"]

_T = TypeVar("_T")

BETAS = (0.9, 0.95)
"""As is usual for transformers: the second moment forgets within some 20 steps."""


class TrainingRun:
    """One run of a job: ``await run()`` once, ``stop()`` from anywhere on the same loop to end it early.

    ``make_workload`` is called in a thread, with torch's global generator seeded. ``progress`` is told how it
    goes; ``collector`` counts what it does for Prometheus, and registering it is the caller's part.
    """

    def __init__(
        self,
        job: Job,
        make_workload: Callable[[], Workload],
        *,
        progress: ProgressSink | None = None,
        collector: PipelineCollector | None = None,
    ) -> None:
        self._job = job
        self._make_workload = make_workload
        self._progress: ProgressSink = progress if progress is not None else NullProgress()
        self._collector = collector
        self._recorder = _Recorder(job.observe.trace_steps)
        self._meter = Meter(job.training.steps)
        self._stopping = False

    def stop(self) -> None:
        """Let the run end after the step under way; evaluation and sample are left out."""
        self._stopping = True

    async def run(self) -> TrainingSummary:
        """Train, evaluate and sample. Closes the pipeline and writes the trace however it ends.

        Cancellation takes effect between two tasks. Raises ``JobFileError`` where the job does not fit the
        workload or this machine, ``TaskError`` for the first task that fails.
        """
        _make_folders(self._job)
        workload = await _in_thread(self._build)
        evaluation = sample = None
        written = Observe()
        if await self._choose_schedule(workload):
            try:
                async with self._pipeline(workload) as pipe:
                    self._progress.started(self._description(pipe))
                    await self._train(pipe, workload)
                    pipe.eval()
                    # What follows is no training: it would bend the operator's view of bubbles and durations.
                    pipe.observers.clear()
                    evaluation = await self._evaluate(pipe, workload)
                    sample = await self._sample(pipe, workload)
            finally:
                written = self._recorder.write(self._job)
        meter = self._meter
        return TrainingSummary(
            name=self._job.name,
            steps=meter.step,
            stopped=self._stopping,
            loss=meter.loss,
            seconds=meter.seconds,
            tokens_per_second=meter.tokens_per_second,
            bubble_ratio=meter.bubble_ratio,
            evaluation=evaluation,
            sample=sample,
            trace=written.trace,
            timeline=written.timeline,
        )

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
            plan = await _in_thread(lambda: choose_for(self._job, workload, progress=heed_stop))
        except _Stopped:
            return False
        self._job = with_plan(self._job, plan)
        self._progress.entered(f"chosen: {plan}; predicted {plan.seconds * 1e3:.0f} ms a step")
        return True

    def _pipeline(self, workload: Workload) -> Pipeline:
        table = self._job.pipeline
        collectors = [] if self._collector is None else [self._collector]
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
                observers=[self._recorder, *collectors],
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

    async def _train(self, pipe: Pipeline, workload: Workload) -> None:
        training = self._job.training
        pipe.train()
        updater = _Updater(pipe.parameters(), training)
        generator = torch.Generator().manual_seed(training.seed)
        batches = workload.batches(training.batch_size, generator)
        for _ in range(training.steps):
            start = perf_counter()
            batch = next(batches, None)
            if batch is None or self._stopping:
                return
            await self._step(pipe, batch, workload.tokens_per_sample, updater, start)

    async def _step(
        self, pipe: Pipeline, batch: Batch, tokens_per_sample: int, updater: _Updater, start: float
    ) -> None:
        x, target = batch
        result = await pipe.step(x, target, return_outputs=False)
        assert result.loss is not None
        rate = learning_rate(self._meter.step, self._job.training)
        # In a thread: on a CPU the update takes a while, and on a GPU reading the loss waits for the device.
        loss, norm = await _in_thread(lambda: updater.update(rate, result.loss))
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
        if self._collector is not None:
            self._collector.training_step(loss, progress.samples, progress.tokens, progress.seconds)
        self._progress.stepped(progress)

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
            total += await _in_thread(result.loss.item) * len(x)
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
        self._optimizer = torch.optim.AdamW([group for group in groups if group["params"]], betas=BETAS, fused=True)

    def update(self, rate: float, loss: Tensor | None) -> tuple[float, float]:
        """Move the weights along their gradients and clear these; returns ``loss`` and the gradient norm as numbers."""
        assert loss is not None
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        norm = nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item(), norm.item()


# What is left behind


class _Recorder:
    """An observer that keeps the records of the last steps."""

    def __init__(self, steps: int) -> None:
        self._records: deque[StepRecord] = deque(maxlen=steps)

    def step_completed(self, record: StepRecord) -> None:
        self._records.append(record)

    def write(self, job: Job) -> Observe:
        """Write what the job asks for, if any step ran; returns the paths that were written."""
        observe = job.observe
        if not self._records:
            return Observe()
        if observe.trace is not None:
            write_trace(self._records, observe.trace)
        if observe.timeline is not None:
            picture = svg_timeline(self._records[-1], title=job.name)
            observe.timeline.write_text(picture, encoding="utf-8")
        return observe


def _make_folders(job: Job) -> None:
    """Make the folders of the files to write, so that a mistyped path ends the run before it begins."""
    for key in ("trace", "timeline"):
        path = getattr(job.observe, key)
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise job_file_error(job.path, f"observe.{key}: cannot make {path.parent}: {error.strerror}") from error
        if path.is_dir():
            raise job_file_error(job.path, f"observe.{key}: {path} is a folder; it must be the path of a file to write")


async def _in_thread(function: Callable[[], _T]) -> _T:
    """Run ``function`` in a thread of the loop's pool; a cancellation is raised only when it has ended."""
    future = asyncio.get_running_loop().run_in_executor(None, function)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await outlast(future)
        future.exception()  # Retrieved: the cancellation is what the caller learns.
        raise
