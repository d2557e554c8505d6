"""Jobs that share devices: whether weights divide device time, and what a background job gains and costs.

Weights are measured with real models on real threads::

    weight 1 ──┐
    weight 3 ──┴─▶ DevicePool ─▶ cpu:0, cpu:1       seconds of compute, while both run ─▶ 1 : 3

The background is measured on emulated devices, whose tasks take given times, so that the foreground's bubbles depend on
its schedule alone and not on the machine::

    cpu:0  F0 F1 F2 F3 ········ B0 ·· B1 ·· B2 ·· B3      4-stage 1F1B, few micro-batches: every · is idle,
    cpu:1  ··· F0 F1 F2 B0 ·· B1 F3 B2 ·· B3 ·······      and the background may use it
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.cases import loss_fn, mlp
from asyncpipe.bench.harness import markdown, rounds, run_on_loop
from asyncpipe.core.graph.task import Queue, Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.policies.share import Share
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.report import Report
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.testing import EmulatedExecutor
from benchmarks.turns import alternating

__all__ = ["SharingSize", "compute_within", "run", "show"]

WEIGHTS = (1.0, 3.0)
DEVICES, MICROBATCHES = 4, 4
"""Of the foreground job beside a background job, which has large bubbles."""
MANY = 64
"""Micro-batches of the background job, so that every stage has a ready task when its device idles."""


@dataclass(frozen=True, slots=True)
class SharingSize:
    """The jobs, and how long they run."""

    width: int = 512
    """Of the models of both weighted jobs, of eight layers."""
    weighted_steps: int = 200
    """Of the heavier job."""
    warm_up: int = 5
    costs: Costs = field(default_factory=lambda: Costs(0.01, 0.02))
    """Seconds of a forward and of a backward of the foreground."""
    background_costs: Costs = field(default_factory=lambda: Costs(0.0025, 0.005))
    steps: int = 5
    """Of the foreground in a turn."""
    rounds: int = 12
    """Turns with a background, and the same number without."""


def run(progress: Progress, *, size: SharingSize | None = None) -> Figures:
    """Device seconds of two weighted jobs and their ratio; the background's share of the idle time, and its cost."""
    size = size or SharingSize()
    weights = run_on_loop(_weights(size, progress))
    return {"rounds": size.rounds, "weights": weights, "background": run_on_loop(_background(size, progress))}


show = markdown(
    weights="Two foreground jobs on 2 CPU devices:",
    background=f"A background job beside 1F1B with {MICROBATCHES} micro-batches on {DEVICES} emulated devices, medians "
    "of {rounds} turns with it and as many without; its share is that of the foreground's idle time:",
)


class _SharingJob:
    """A pipeline, and the reports of its steps."""

    def __init__(self, pool: DevicePool, model: nn.Sequential, devices: int, x: torch.Tensor, **options: Any) -> None:
        names = [f"cpu:{device}" for device in range(devices)]
        self.pipe = Pipeline(model, names, loss_fn=loss_fn, pool=pool, **options)
        self.reports: list[Report] = []
        self._x = x

    async def step(self) -> None:
        result = await self.pipe.step(self._x, self._x, return_outputs=False)
        self.pipe.module.zero_grad()
        self.reports.append(result.report)

    @asynccontextmanager
    async def repeating(self) -> AsyncIterator[None]:
        """Repeat the step during the block, which starts after the first one."""
        await self.step()
        over = asyncio.Event()
        task = asyncio.create_task(_until(over, self.step))
        try:
            yield
        finally:
            over.set()
            await task


async def _until(over: asyncio.Event, step: Callable[[], Awaitable[None]]) -> None:
    while not over.is_set():
        await step()


def compute_within(job: Sequence[Report], begun: float, ended: float) -> float:
    """Device seconds that the steps of a job compute between two times of the executors' clock."""
    tasks = [
        (report.origin + time.start, report.origin + time.end)
        for report in job
        for time in report.tasks
        if time.task.lane.queue is Queue.COMPUTE
    ]
    return sum(max(0.0, min(end, ended) - max(start, begun)) for start, end in tasks)


def _end(report: Report) -> float:
    return report.origin + report.end


async def _weights(size: SharingSize, progress: Progress) -> Figures:
    async with DevicePool() as pool:
        light, heavy = (
            _SharingJob(
                *(pool, mlp(size.width, 8, nn.Tanh), 2, torch.randn(256, size.width)),
                share=Share(f"weight {weight:g}", weight=weight),
                microbatches=8,
            )
            for weight in WEIGHTS
        )
        async with light.pipe, heavy.pipe, light.repeating():
            for _ in rounds(size.warm_up + size.weighted_steps, progress, "weights: step"):
                await heavy.step()
    span = _end(heavy.reports[size.warm_up - 1]), _end(heavy.reports[-1])
    seconds = [compute_within(job.reports, *span) for job in (light, heavy)]
    ratio, wanted = seconds[1] / seconds[0], WEIGHTS[1] / WEIGHTS[0]
    return {"weights": WEIGHTS, "device_seconds": seconds, "ratio": ratio, "by_the_weights": wanted}


class _SharedDevice(EmulatedExecutor):
    """An emulated device with different costs for each job; the number of micro-batches identifies the job."""

    def __init__(self, device: str, costs: dict[int, Costs]) -> None:
        super().__init__(device, Costs())
        self._costs = costs

    def seconds(self, graph: TaskGraph, task: Task) -> float:
        return self._costs[graph.shape.microbatches](task)


async def _background(size: SharingSize, progress: Progress) -> Figures:
    costs = {MICROBATCHES: size.costs, MANY: size.background_costs}
    turns: dict[bool, list[list[Report]]] = {False: [], True: []}
    async with DevicePool(executors=lambda device: _SharedDevice(device, costs)) as pool:

        def job(microbatches: int, **options: Any) -> _SharingJob:
            model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(DEVICES))), torch.randn(microbatches, 4)
            return _SharingJob(pool, model, DEVICES, x, microbatches=microbatches, checkpoint="never", **options)

        front = job(MICROBATCHES, schedule="1f1b", share=Share("foreground"))
        # As a hint any ready task may run. In 1F1B's strict order the background would have bubbles of its own.
        back = job(MANY, schedule="gpipe", order="hint", share=Share("background", background=True))
        async with front.pipe, back.pipe:
            for number in rounds(size.rounds, progress, "background: round"):
                for beside in alternating((False, True), number):
                    async with back.repeating() if beside else nullcontext():
                        for _ in range(size.steps):
                            await front.step()
                        turns[beside].append(front.reports[-size.steps :])
    seconds = {beside: [sum(step.seconds for step in turn) for turn in of] for beside, of in turns.items()}
    idle = {
        beside: sum(DEVICES * step.seconds - sum(step.device_busy.values()) for turn in of for step in turn)
        for beside, of in turns.items()
    }
    got = sum(compute_within(back.reports, _end(turn[0]) - turn[0].seconds, _end(turn[-1])) for turn in turns[True])
    growths = [with_it / alone - 1 for with_it, alone in zip(seconds[True], seconds[False], strict=True)]
    return {
        "alone_seconds": median(seconds[False]) / size.steps,
        "idle_share": idle[False] / DEVICES / sum(seconds[False]),
        "beside_seconds": median(seconds[True]) / size.steps,
        "growth_share": median(growths),
        "quartiles_share": quantiles(growths, n=4)[::2],
        "background_share": got / idle[True],
    }
