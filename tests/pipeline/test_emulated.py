"""On emulated devices, where copies take time, a real step overlaps as the graph allows."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch
from torch import nn

from asyncpipe import Costs, Pipeline, TaskError
from asyncpipe.core.engine.events import TaskCompleted
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


async def test_every_dependency_holds_in_time(workload):
    async with pipeline(workload.model(), schedule="1f1b", checkpoint="always") as pipe:
        result = await pipe.step(workload.x, workload.target)
    times = {time.task.number: time for time in result.report.tasks}
    for edge in result.record.graph.edges():
        assert times[edge.dependency].end <= times[edge.task].start
    assert all(time.seconds >= COSTS(time.task) for time in times.values())


async def test_a_failure_ends_the_step_and_the_next_one_is_right(workload, before_task, no_leaks):
    def fault(task):
        if task.id == "R(1,1)":
            raise ValueError("no")

    model = workload.model()
    async with pipeline(model) as pipe:
        before_task(fault)
        with pytest.raises(TaskError, match="no"):
            await pipe.step(workload.x, workload.target)
        before_task(lambda task: None)
        await pipe.step(workload.x, workload.target)
    assert workload.worst(model) < 1e-10


async def test_steps_of_zb_h2_overlap():
    """A step by itself has one of 2/20; each device updates its stage and goes on without waiting for the others."""
    costs = Costs(forward=0.02, backward=0.04, recompute=0.02, input_gradient=0.02, weight_gradient=0.02)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    batches = [(torch.randn(12, 4), torch.randn(12, 4)) for _ in range(4)]
    async with Pipeline(
        model,
        ["cpu:0", "cpu:1", "cpu:2"],
        executors=lambda device: EmulatedExecutor(device, costs),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        schedule="zb-h2",
        microbatches=6,
        loss_fn=mse,
        checkpoint="never",
    ) as pipe:
        records = [(await result.completed()).record async for result in pipe.steps(batches)]
    times = [
        [(event.started, event.ended) for _, event in record.journal if isinstance(event, TaskCompleted)]
        for record in records
    ]
    # The last device is two tasks behind the first, which does not wait for it.
    for earlier, later in pairwise(times):
        assert min(later)[0] < max(ended for _, ended in earlier)
