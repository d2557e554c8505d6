"""Jobs that share devices: whether weights divide device time, and what a background job gains and costs.

Weights are measured with real models on real threads::

    weight 1 ──┐
    weight 3 ──┴─▶ DevicePool ─▶ cpu:0, cpu:1       seconds of compute, while both train ─▶ 1 : 3

The background is measured on emulated devices, whose tasks take given times, so that the foreground's bubbles depend on
its schedule alone and not on the machine::

    cpu:0  F0 F1 F2 F3 ········ B0 ·· B1 ·· B2 ·· B3      4-stage 1F1B, few micro-batches: every · is idle,
    cpu:1  ··· F0 F1 F2 B0 ·· B1 F3 B2 ·· B3 ·······      and the background may use it
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
from torch import nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import alternating, mlp, rounds, run_on_loop
from asyncpipe.core.engine.events import StepRecord, StepSubmitted, TaskCompleted
from asyncpipe.core.engine.share import Share
from asyncpipe.core.graph.task import Queue, Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.predict.costs import Costs
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.testing import EmulatedExecutor

__all__ = ["BackgroundSize", "BusyInterval", "WeightsSize", "run", "show", "within"]


@dataclass(frozen=True, slots=True)
class WeightsSize:
    """Two jobs with the same model."""

    weights: tuple[float, float] = (1.0, 3.0)
    steps: int = 200
    """Of the heavier job."""
    warm_up: int = 5
    """Steps of the lighter job before the measurement."""
    devices: int = 2
    layers: int = 8
    width: int = 512
    samples: int = 256
    microbatches: int = 8


@dataclass(frozen=True, slots=True)
class BackgroundSize:
    """A foreground job with large bubbles, and a background job of smaller tasks."""

    devices: int = 4
    microbatches: int = 4
    costs: Costs = field(default_factory=lambda: Costs(0.01, 0.02))
    """Seconds of a forward and of a backward."""
    background_microbatches: int = 64
    """Many, so that every stage has a ready task when its device idles."""
    background_schedule: str = "gpipe"
    """Used as a hint: any ready task may run. In 1F1B's strict order the background would have bubbles of its own."""
    background_costs: Costs = field(default_factory=lambda: Costs(0.0025, 0.005))
    steps: int = 5
    """Of the foreground in a turn."""
    rounds: int = 12
    """Turns with a background, and the same number without."""


def run(progress: Progress, *, weights: WeightsSize | None = None, background: BackgroundSize | None = None) -> Figures:
    """Device seconds of two weighted jobs and their ratio; the background's share of the idle time, and its cost."""
    return {
        "weights": run_on_loop(_weights(weights or WeightsSize(), progress)),
        "background": run_on_loop(_background(background or BackgroundSize(), progress)),
    }


def show(figures: Figures) -> str:
    """The figures, a line each."""
    weights, background = figures["weights"], figures["background"]
    low, _, high = quantiles(background["growths"], n=4)
    wanted = " : ".join(f"{weight:g}" for weight in weights["weights"])
    return "\n".join(
        [
            f"two foreground jobs on {weights['devices']} CPU devices, weights {wanted}, {weights['steps']} steps of "
            "the heavier one",
            f"  device time          {weights['seconds'][0]:8.2f} s and {weights['seconds'][1]:.2f} s",
            f"  ratio                {weights['ratio']:8.3f}   (by the weights {weights['wanted']:g}: "
            f"{weights['ratio'] / weights['wanted'] - 1:+.1%})",
            f"a background job beside 1F1B with {background['microbatches']} micro-batches on {background['devices']} "
            f"emulated devices; {background['rounds']} turns with it, as many without",
            f"  foreground alone     {background['alone_seconds'] * 1e3:8.1f} ms a step, "
            f"{background['idle']:.0%} of the devices' time idle",
            f"  with the background  {background['beside_seconds'] * 1e3:8.1f} ms a step",
            f"  growth               {background['growth']:+8.1%}   (half of the rounds: {low:+.1%} to {high:+.1%})",
            f"  of the idle time it gets {background['share']:.0%}",
        ]
    )


# Recording


class BusyInterval(NamedTuple):
    """An interval of compute on a device, in seconds of the executors' clock."""

    begun: float
    ended: float


class _JobRecorder:
    """An observer that records the compute intervals and steps of one job."""

    def __init__(self) -> None:
        self.tasks: list[BusyInterval] = []
        self.steps: list[tuple[BusyInterval, float]] = []
        """The interval from submission to the end of the last task, and the seconds of compute in it."""

    def step_completed(self, record: StepRecord) -> None:
        """Record the times of the step's tasks."""
        tasks = [
            BusyInterval(event.started, event.ended)
            for _, event in record.journal
            if isinstance(event, TaskCompleted) and record.graph.tasks[event.task].lane.queue is Queue.COMPUTE
        ]
        submitted = next(at for at, event in record.journal if isinstance(event, StepSubmitted))
        self.tasks += tasks
        self.steps.append(
            (BusyInterval(submitted, max(task.ended for task in tasks)), within(tasks, (submitted, float("inf"))))
        )


def within(tasks: Iterable[BusyInterval], span: tuple[float, float]) -> float:
    """Seconds of ``tasks`` inside ``span``."""
    begun, ended = span
    return sum(max(0.0, min(task.ended, ended) - max(task.begun, begun)) for task in tasks)


# Weights


async def _weights(size: WeightsSize, progress: Progress) -> Figures:
    recorders = [_JobRecorder(), _JobRecorder()]
    over = asyncio.Event()
    async with DevicePool() as pool:
        jobs = [
            asyncio.create_task(_train(pool, f"job {number}", weight, recorders[number], size, over))
            for number, weight in enumerate(size.weights)
        ]
        try:
            span = await _both(jobs, recorders, size, progress)
        finally:
            over.set()
            await asyncio.gather(*jobs)
    seconds = [within(recorder.tasks, span) for recorder in recorders]
    return {
        "weights": list(size.weights),
        "devices": size.devices,
        "steps": size.steps,
        "seconds": seconds,
        "ratio": seconds[1] / seconds[0],
        "wanted": size.weights[1] / size.weights[0],
    }


async def _both(
    jobs: Sequence[asyncio.Task[None]], recorders: Sequence[_JobRecorder], size: WeightsSize, progress: Progress
) -> tuple[float, float]:
    """The interval of the measurement: from the lighter job's last warm-up step to the heavier one's last step."""
    light, heavy = recorders
    first = None
    while first is None or len(heavy.steps) < first + size.steps:
        if any(job.done() for job in jobs):
            break  # It failed; awaiting it raises its error.
        await asyncio.sleep(0.05)
        if first is None and heavy.steps and len(light.steps) >= size.warm_up:
            first = len(heavy.steps)
            begun = max(recorder.steps[-1][0].ended for recorder in recorders)
        progress(f"weights: {len(heavy.steps) - (first or 0)} of {size.steps} steps")
    return begun, min(recorder.steps[-1][0].ended for recorder in recorders)


async def _train(
    pool: DevicePool, name: str, weight: float, recorder: _JobRecorder, size: WeightsSize, over: asyncio.Event
) -> None:
    """Train until ``over`` is set; the weights are updated in a thread, as the service does it."""
    torch.manual_seed(0)
    model = mlp(size.width, size.layers, nn.Tanh)
    x = torch.randn(size.samples, size.width)
    async with Pipeline(
        model,
        [f"cpu:{device}" for device in range(size.devices)],
        microbatches=size.microbatches,
        loss_fn=nn.functional.mse_loss,
        pool=pool,
        share=Share(name, weight=weight),
        observers=[recorder],
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        while not over.is_set():
            await pipe.step(x, x, return_outputs=False)
            await asyncio.to_thread(update)


# Background


class _SharedDevice(EmulatedExecutor):
    """An emulated device with different costs for each job; the number of micro-batches identifies the job."""

    def __init__(self, device: str, costs: dict[int, Costs]) -> None:
        super().__init__(device, Costs())
        self._costs = costs

    def seconds(self, graph: TaskGraph, task: Task) -> float:
        return self._costs[graph.shape.microbatches](task)


class _BackgroundJob:
    """A background job that can be started and stopped."""

    def __init__(self, pipe: Pipeline, x: torch.Tensor) -> None:
        self._pipe = pipe
        self._x = x

    @asynccontextmanager
    async def running(self) -> Any:
        """Run steps during the block, which starts after the first steps."""
        over, under_way = asyncio.Event(), asyncio.Event()

        async def train() -> None:
            while not over.is_set():
                await self._pipe.step(self._x, self._x, return_outputs=False)
                self._pipe.module.zero_grad()
                under_way.set()

        task = asyncio.create_task(train())
        try:
            await asyncio.wait([task, asyncio.ensure_future(under_way.wait())], return_when=asyncio.FIRST_COMPLETED)
            yield
        finally:
            over.set()
            await task


async def _background(size: BackgroundSize, progress: Progress) -> Figures:
    costs = {size.microbatches: size.costs, size.background_microbatches: size.background_costs}
    front, back = _JobRecorder(), _JobRecorder()
    async with DevicePool(executors=lambda device: _SharedDevice(device, costs)) as pool:
        foreground = _small(pool, size.devices, size.microbatches, Share("foreground"), front, "1f1b")
        share, many = Share("background", background=True), size.background_microbatches
        background = _small(pool, size.devices, many, share, back, size.background_schedule)
        async with foreground, background:
            beside = _BackgroundJob(background, torch.randn(size.background_microbatches, 4))
            spans = await _turns(size, foreground, front, beside, progress)
    return _background_figures(size, spans, back)


async def _turns(
    size: BackgroundSize, foreground: Pipeline, front: _JobRecorder, background: _BackgroundJob, progress: Progress
) -> dict[bool, list[list[tuple[BusyInterval, float]]]]:
    """The foreground's steps of each turn, alone and beside the background."""
    x = torch.randn(size.microbatches, 4)
    spans: dict[bool, list[list[tuple[BusyInterval, float]]]] = {False: [], True: []}

    async def turn(*, beside: bool) -> None:
        front.steps.clear()
        for _ in range(size.steps):
            await foreground.step(x, x, return_outputs=False)
            foreground.module.zero_grad()
        spans[beside].append(list(front.steps))

    for number in rounds(size.rounds, progress, "background: round"):
        for beside in alternating((False, True), number):
            async with background.running() if beside else nullcontext():
                await turn(beside=beside)
    return spans


def _background_figures(
    size: BackgroundSize, spans: dict[bool, list[list[tuple[BusyInterval, float]]]], back: _JobRecorder
) -> Figures:
    def seconds(turn: list[tuple[BusyInterval, float]]) -> float:
        return sum(span.ended - span.begun for span, _ in turn)

    def idle(turns: list[list[tuple[BusyInterval, float]]]) -> float:
        return sum(size.devices * seconds(turn) - sum(busy for _, busy in turn) for turn in turns)

    growths = [seconds(beside) / seconds(alone) - 1 for beside, alone in zip(spans[True], spans[False], strict=True)]
    got = sum(within(back.tasks, span) for turn in spans[True] for span, _ in turn)
    return {
        "devices": size.devices,
        "microbatches": size.microbatches,
        "background_microbatches": size.background_microbatches,
        "rounds": size.rounds,
        "alone_seconds": median(seconds(turn) / size.steps for turn in spans[False]),
        "beside_seconds": median(seconds(turn) / size.steps for turn in spans[True]),
        "idle": idle(spans[False]) / sum(size.devices * seconds(turn) for turn in spans[False]),
        "growth": median(growths),
        "growths": growths,
        "share": got / idle(spans[True]),
    }


def _small(
    pool: DevicePool, devices: int, microbatches: int, share: Share, recorder: _JobRecorder, schedule: str
) -> Pipeline:
    """A pipeline of tiny layers, for emulated devices."""
    return Pipeline(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(devices))),
        [f"cpu:{device}" for device in range(devices)],
        microbatches=microbatches,
        schedule=schedule,
        order="hint" if share.background else "strict",
        checkpoint="never",
        loss_fn=nn.functional.mse_loss,
        pool=pool,
        share=share,
        observers=[recorder],
    )
