"""On emulated devices, where copies take time, a real step overlaps as the graph allows."""

from __future__ import annotations

import threading

from torch import nn

from asyncpipe import Costs, Pipeline
from asyncpipe.testing import EmulatedExecutor

mse = nn.functional.mse_loss
COSTS = Costs(forward=0.002, backward=0.002, recompute=0.002, copy=0.005)


def pipeline(model, **options):
    options = {"schedule": "gpipe", "microbatches": 4, "loss_fn": mse} | options
    return Pipeline(
        model, ["cpu:0", "cpu:1", "cpu:2"], executors=lambda device: EmulatedExecutor(device, COSTS), **options
    )


async def test_recomputation_overlaps_the_copy_of_the_gradient(workload, before_task, no_leaks):
    """The copy of a gradient waits until the recomputation has begun: without overlap, this would hang."""
    begun = {(i, j): threading.Event() for i in range(4) for j in range(3)}

    def hook(task):
        if task.kind == "R":
            begun[task.microbatch, task.stage].set()
        if task.is_gradient_copy and task.microbatch < 3:
            assert begun[task.microbatch, task.stage].wait(30)

    before_task(hook)
    model = workload.model()
    async with pipeline(model) as pipe:
        await pipe.step(workload.x, workload.target)
    assert workload.worst(model) < 1e-10
