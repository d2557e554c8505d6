"""A compute-bound model as a pipeline on 2 CPU devices, against what is possible and against one device.

Both arms run the same micro-batches of the same model, in turn, in one process: the pipeline on two devices
with one intra-op thread each, and a plain loop without any library on one thread.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch
from torch import Tensor, nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.ops.device.intra_op_threads import IntraOpThreads
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.runtime.portal import new_event_loop

__all__ = ["run", "show"]

WIDTH = 1024
LAYERS = 8
MICROBATCHES = 16
SAMPLES = 128 * MICROBATCHES
ROUNDS = 9
WARM_UP = 2


def run(progress: Progress) -> Figures:
    """Medians over alternating rounds: step over bound, and one device over two."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_run(progress))


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
    alone = _model()
    threads = IntraOpThreads(1)
    with ThreadPoolExecutor(1, initializer=threads.initializer()) as pool:
        pool.submit(int).result()
        threads.settle()
        rounds = []
        async with Pipeline(
            _model(), ["cpu:0", "cpu:1"], microbatches=MICROBATCHES, checkpoint="never", loss_fn=nn.functional.mse_loss
        ) as pipe:
            for number in range(WARM_UP + ROUNDS):
                progress(f"round {number + 1} of {WARM_UP + ROUNDS}")
                rounds.append(await _round(pipe, alone, pool, x, target))
    columns = {name: median(row[name] for row in rounds[WARM_UP:]) for name in rounds[0]}
    return {**columns, "microbatches": MICROBATCHES, "rounds": ROUNDS, "devices": 2}


async def _round(pipe: Pipeline, alone: nn.Module, pool: ThreadPoolExecutor, x: Tensor, target: Tensor) -> Figures:
    start = time.perf_counter()
    result = await pipe.step(x, target, return_outputs=False)
    step = time.perf_counter() - start
    _drop_gradients(pipe.module)
    report = result.report
    start = time.perf_counter()
    await asyncio.get_running_loop().run_in_executor(pool, _single_step, alone, x, target)
    single = time.perf_counter() - start
    _drop_gradients(alone)
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


def _model() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))


def _drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None
