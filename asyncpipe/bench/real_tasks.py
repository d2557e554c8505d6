"""What a step of real tasks costs beyond the work itself: (step − busiest device's time in the plain loop) / tasks.

Time inside tasks is not taken off as the step's own journal has it: there, a task that the runtime slows down, or that
waits for the interpreter's lock, would hide what it costs. What counts is how long the same stage takes without any
library, alone, in one thread. So bubbles count as well; and where there are fewer cores than devices, so does the time
in which devices wait for a core. The second number leaves that out: it takes off the work of all devices, by the cores.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import lone_thread, medians, mlp, rounds
from asyncpipe.pipeline.pipeline import Pipeline

__all__ = ["RealTasksSize", "cores", "real_tasks", "stage_seconds"]

_loss = nn.functional.mse_loss


@dataclass(frozen=True, slots=True)
class RealTasksSize:
    """A model of equal stages, one on each device, and how often its step is measured."""

    width: int = 256
    layers: int = 4
    """Of each stage."""
    microbatches: int = 16
    rows: int = 32
    """Of a micro-batch."""
    warm_up: int = 3
    rounds: int = 15


async def real_tasks(devices: int, size: RealTasksSize, progress: Progress) -> Figures:
    """Medians over rounds, in each of which the step and the plain loop take turns, without recomputation."""
    torch.manual_seed(0)
    alone, model = (
        nn.Sequential(*(mlp(size.width, size.layers) for _ in range(devices))) for _ in ("plain loop", "pipeline")
    )
    x, target = torch.randn(2, size.microbatches * size.rows, size.width)
    names, balance = [f"cpu:{k}" for k in range(devices)], [1] * devices
    with lone_thread() as pool:
        async with Pipeline(
            model, names, microbatches=size.microbatches, balance=balance, checkpoint="never", loss_fn=_loss
        ) as pipe:
            what = f"real tasks on {devices} devices, round"
            rows = [
                await _round(pipe, list(alone), pool, x, target)
                for _ in rounds(size.warm_up + size.rounds, progress, what)
            ]
    figures = medians(rows[size.warm_up :])
    return {"devices": devices, **figures, "tasks": int(figures["tasks"])}


async def _round(
    pipe: Pipeline, stages: Sequence[nn.Module], pool: ThreadPoolExecutor, x: Tensor, target: Tensor
) -> dict[str, float]:
    start = time.perf_counter()
    result = await pipe.step(x, target, return_outputs=False)
    step = time.perf_counter() - start
    pipe.module.zero_grad()
    tasks = len(result.report.tasks)
    loop = asyncio.get_running_loop()
    plain = await loop.run_in_executor(pool, stage_seconds, stages, x, target, pipe.microbatches)
    by_cores = sum(plain) / min(cores(), len(stages))
    return {
        "tasks": tasks,
        "step_seconds": step,
        "busiest_seconds": max(plain),
        "us_per_task": (step - max(plain)) / tasks * 1e6,
        "us_per_task_by_cores": (step - max(*plain, by_cores)) / tasks * 1e6,
    }


def stage_seconds(stages: Sequence[nn.Module], x: Tensor, target: Tensor, microbatches: int) -> list[float]:
    """The seconds of each stage in one plain training step, with the loss in the last; drops the gradients."""
    clock = time.perf_counter
    seconds = [0.0] * len(stages)
    for inputs, wanted in zip(x.chunk(microbatches), target.chunk(microbatches), strict=True):
        kept = []
        values = inputs
        for index, stage in enumerate(stages):
            begun = clock()
            entry = values.detach().requires_grad_(index > 0)
            output = stage(entry)
            if index == len(stages) - 1:
                output = _loss(output, wanted) / microbatches
            seconds[index] += clock() - begun
            kept.append((entry, output))
            values = output
        gradient = None
        for index in reversed(range(len(stages))):
            begun = clock()
            entry, output = kept.pop()
            torch.autograd.backward(output, gradient)
            gradient = entry.grad
            seconds[index] += clock() - begun
    for stage in stages:
        stage.zero_grad()
    return seconds


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
