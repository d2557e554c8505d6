"""A compute-bound model as a pipeline on 2 CPU devices, against its bound and against one device.

Both arms run the same micro-batches of the same model: the pipeline on two devices with one intra-op thread each, and a
plain loop without any library on one thread.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import lone_thread, medians, mlp, rounds, run_on_loop
from asyncpipe.pipeline.pipeline import Pipeline

__all__ = ["run", "show"]

WIDTH = 1024
LAYERS = 8
MICROBATCHES = 16
SAMPLES = 128 * MICROBATCHES
ROUNDS = 9
WARM_UP = 2


def run(progress: Progress) -> Figures:
    """Medians over alternating rounds: step over bound, and one device over two."""
    return run_on_loop(_run(progress))


def show(figures: Figures) -> str:
    """The figures, a line each."""
    dispatch_free = 1 + 1 / figures["microbatches"]
    return "\n".join(
        [
            f"(Linear({WIDTH}) + ReLU) × {LAYERS}, {SAMPLES} samples, {MICROBATCHES} micro-batches, 1f1b",
            f"pipeline step on 2 CPU devices  {figures['step_seconds'] * 1e3:8.1f} ms",
            f"one device, one thread          {figures['single_seconds'] * 1e3:8.1f} ms",
            f"step / bound                    {figures['step_over_bound']:8.3f}  (busiest device or critical path)",
            f"step / busiest device           {figures['step_over_busiest']:8.3f}  (bubble alone: {dispatch_free:.3f})",
            f"speed-up over one device        {figures['speedup']:8.2f}",
        ]
    )


async def _run(progress: Progress) -> Figures:
    torch.manual_seed(0)
    x, target = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    alone, model = mlp(WIDTH, LAYERS), mlp(WIDTH, LAYERS)
    loss_fn, devices = nn.functional.mse_loss, ["cpu:0", "cpu:1"]
    with lone_thread() as pool:
        async with Pipeline(model, devices, microbatches=MICROBATCHES, checkpoint="never", loss_fn=loss_fn) as pipe:
            rows = [await _round(pipe, alone, pool, x, target) for _ in rounds(WARM_UP + ROUNDS, progress)]
    return {**medians(rows[WARM_UP:]), "microbatches": MICROBATCHES, "rounds": ROUNDS, "devices": 2}


async def _round(pipe: Pipeline, alone: nn.Module, pool: ThreadPoolExecutor, x: Tensor, target: Tensor) -> Figures:
    start = time.perf_counter()
    result = await pipe.step(x, target, return_outputs=False)
    step = time.perf_counter() - start
    pipe.module.zero_grad()
    report = result.report
    start = time.perf_counter()
    await asyncio.get_running_loop().run_in_executor(pool, _single_step, alone, x, target)
    single = time.perf_counter() - start
    alone.zero_grad()
    return {
        "step_seconds": step,
        "single_seconds": single,
        "step_over_bound": step / report.bound,
        "step_over_busiest": step / max(report.device_busy.values()),
        "speedup": single / step,
    }


def _single_step(model: nn.Module, x: Tensor, target: Tensor) -> None:
    for inputs, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        torch.autograd.backward(nn.functional.mse_loss(model(inputs), wanted) / MICROBATCHES)
