"""Jobs that share devices: whether weights divide device time, and what a background job gains and costs.

Weights are measured with real models on real threads::

    weight 1 ──┐
    weight 3 ──┴─▶ DevicePool ─▶ cpu:0, cpu:1       seconds of compute, while both train ─▶ 1 : 3

The background is measured on emulated devices, whose tasks take given times, so that the foreground's bubbles depend on
its schedule alone and not on the machine::

    cpu:0  F0 F1 F2 F3 ········ B0 ·· B1 ·· B2 ·· B3      4-stage 1F1B, few micro-batches: every · is idle,
    cpu:1  ··· F0 F1 F2 B0 ·· B1 F3 B2 ·· B3 ·······      and the background may use it

With ``--beside N``, N other processes compute meanwhile: wake-ups come late, and tasks take longer than expected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles
from typing import NamedTuple

import torch
from torch import nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import alternating, busy_processes, mlp, rounds, run_on_loop
from asyncpipe.core.engine.events import StepSubmitted, TaskCompleted
from asyncpipe.core.graph.task import Queue, Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.policies.share import Share
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.records.step_record import StepRecord
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


def run(
    progress: Progress,
    *,
    beside: int = 0,
    weights: WeightsSize | None = None,
    background: BackgroundSize | None = None,
) -> Figures:
    """Device seconds of two weighted jobs and their ratio; the background's share of the idle time, and its cost.

    Meanwhile ``beside`` other processes compute.
    """
    with busy_processes(beside):
        return {
            "beside": beside,
            "weights": run_on_loop(_weights(weights or WeightsSize(), progress)),
            "background": run_on_loop(_background(background or BackgroundSize(), progress)),
        }


def show(figures: Figures) -> str:
    """The figures, a line each."""
    weights, background = figures["weights"], figures["background"]
    low, _, high = quantiles(background["growths"], n=4)
    wanted = " : ".join(f"{weight:g}" for weight in weights["weights"])
    beside = [f"beside {figures['beside']} other busy processes"] if figures["beside"] else []
    return "\n".join(
        [
            *beside,
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


class RecordedStep(NamedTuple):
    """The interval from a step's submission to the end of its last task, and the seconds of compute in it."""

    begun: float
    ended: float
    busy: float


class _JobRecorder:
    """An observer that records the compute intervals and steps of one job."""

    def __init__(self) -> None:
        self.tasks: list[BusyInterval] = []
        self.steps: list[RecordedStep] = []

    def step_completed(self, record: StepRecord) -> None:
        """Record the times of the step's tasks."""
        tasks = [
            BusyInterval(event.started, event.ended)
            for _, event in record.journal
            if isinstance(event, TaskCompleted) and record.graph.tasks[event.task].lane.queue is Queue.COMPUTE
        ]
        submitted = next(at for at, event in record.journal if isinstance(event, StepSubmitted))
        self.tasks += tasks
        busy = sum(task.ended - task.begun for task in tasks)
        self.steps.append(RecordedStep(submitted, max(task.ended for task in tasks), busy))


def within(tasks: Iterable[BusyInterval], begun: float, ended: float) -> float:
    """Seconds of ``tasks`` between ``begun`` and ``ended``."""
    return sum(max(0.0, min(task.ended, ended) - max(task.begun, begun)) for task in tasks)


@asynccontextmanager
async def _repeating(step: Callable[[], Awaitable[None]]) -> AsyncIterator[asyncio.Task[None]]:
    """Repeat ``step`` during the block, which starts after the first one; yields the task that repeats it."""
    over, under_way = asyncio.Event(), asyncio.Event()

    async def repeat() -> None:
        while not over.is_set():
            await step()
            under_way.set()

    task = asyncio.create_task(repeat())
    try:
        await asyncio.wait([task, asyncio.ensure_future(under_way.wait())], return_when=asyncio.FIRST_COMPLETED)
        yield task
    finally:
        over.set()
        await task


# Weights


async def _weights(size: WeightsSize, progress: Progress) -> Figures:
    light, heavy = _JobRecorder(), _JobRecorder()
    first = None
    async with (
        DevicePool() as pool,
        _job(pool, Share("job 0", weight=size.weights[0]), light, size) as job,
        _job(pool, Share("job 1", weight=size.weights[1]), heavy, size) as other_job,
    ):
        # From the lighter job's last warm-up step to the heavier one's last step.
        while first is None or len(heavy.steps) < first + size.steps:
            if job.done() or other_job.done():
                break  # It failed; leaving the block raises its error.
            await asyncio.sleep(0.05)
            if first is None and len(light.steps) >= size.warm_up:
                first = len(heavy.steps)
                begun = max(light.steps[-1].ended, heavy.steps[-1].ended)
            progress(f"weights: {len(heavy.steps) - (first or 0)} of {size.steps} steps")
        ended = min(light.steps[-1].ended, heavy.steps[-1].ended)
    seconds = [within(recorder.tasks, begun, ended) for recorder in (light, heavy)]
    return {
        "weights": list(size.weights),
        "devices": size.devices,
        "steps": size.steps,
        "seconds": seconds,
        "ratio": seconds[1] / seconds[0],
        "wanted": size.weights[1] / size.weights[0],
    }


@asynccontextmanager
async def _job(
    pool: DevicePool, share: Share, recorder: _JobRecorder, size: WeightsSize
) -> AsyncIterator[asyncio.Task[None]]:
    """Train during the block; the weights are updated in a thread, as the service does it."""
    torch.manual_seed(0)
    model = mlp(size.width, size.layers, nn.Tanh)
    x = torch.randn(size.samples, size.width)
    async with Pipeline(
        model,
        [f"cpu:{device}" for device in range(size.devices)],
        microbatches=size.microbatches,
        loss_fn=nn.functional.mse_loss,
        pool=pool,
        share=share,
        observers=[recorder],
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        async def step() -> None:
            await pipe.step(x, x, return_outputs=False)
            await asyncio.to_thread(update)

        async with _repeating(step) as task:
            yield task


# Background


class _SharedDevice(EmulatedExecutor):
    """An emulated device with different costs for each job; the number of micro-batches identifies the job."""

    def __init__(self, device: str, costs: dict[int, Costs]) -> None:
        super().__init__(device, Costs())
        self._costs = costs

    def seconds(self, graph: TaskGraph, task: Task) -> float:
        return self._costs[graph.shape.microbatches](task)


async def _background(size: BackgroundSize, progress: Progress) -> Figures:
    many = size.background_microbatches
    costs = {size.microbatches: size.costs, many: size.background_costs}
    front, back = _JobRecorder(), _JobRecorder()
    turns: dict[bool, list[list[RecordedStep]]] = {False: [], True: []}
    async with DevicePool(executors=lambda device: _SharedDevice(device, costs)) as pool:
        share = Share("background", background=True)
        foreground = _small(pool, size.devices, size.microbatches, Share("foreground"), front, "1f1b")
        background = _small(pool, size.devices, many, share, back, size.background_schedule)
        async with foreground, background:
            foreground_step = partial(_step, foreground, torch.randn(size.microbatches, 4))
            background_step = partial(_step, background, torch.randn(many, 4))
            for number in rounds(size.rounds, progress, "background: round"):
                for beside in alternating((False, True), number):
                    async with _repeating(background_step) if beside else nullcontext():
                        front.steps.clear()
                        for _ in range(size.steps):
                            await foreground_step()
                        turns[beside].append(list(front.steps))

    def seconds(turn: list[RecordedStep]) -> float:
        return sum(step.ended - step.begun for step in turn)

    def idle(turns: list[list[RecordedStep]]) -> float:
        return sum(size.devices * seconds(turn) - sum(step.busy for step in turn) for turn in turns)

    growths = [seconds(beside) / seconds(alone) - 1 for beside, alone in zip(turns[True], turns[False], strict=True)]
    got = sum(within(back.tasks, step.begun, step.ended) for turn in turns[True] for step in turn)
    return {
        "devices": size.devices,
        "microbatches": size.microbatches,
        "background_microbatches": many,
        "rounds": size.rounds,
        "alone_seconds": median(seconds(turn) / size.steps for turn in turns[False]),
        "beside_seconds": median(seconds(turn) / size.steps for turn in turns[True]),
        "idle": idle(turns[False]) / sum(size.devices * seconds(turn) for turn in turns[False]),
        "growth": median(growths),
        "growths": growths,
        "share": got / idle(turns[True]),
    }


async def _step(pipe: Pipeline, x: torch.Tensor) -> None:
    await pipe.step(x, x, return_outputs=False)
    pipe.module.zero_grad()


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
