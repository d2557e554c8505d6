"""The pipeline on CUDA devices: one GPU as several logical devices, and mixed with the CPU."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from asyncpipe import Pipeline, TaskError

pytestmark = pytest.mark.cuda
mse = nn.functional.mse_loss
DEVICES = [["cuda:0"], ["cuda:0", "cuda:0"], ["cpu:0", "cuda:0"], ["cuda:0", "cpu:0"], ["cuda:0", "cpu:0", "cuda:0"]]


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "backward-first"])
@pytest.mark.parametrize("devices", DEVICES, ids="-".join)
async def test_gradients(workload, devices, schedule, checkpoint):
    model = workload.model()
    options = {"schedule": schedule, "checkpoint": checkpoint, "microbatches": 4, "loss_fn": mse}
    async with Pipeline(model, devices, **options) as pipe:
        for _ in range(3):
            model.zero_grad()
            result = await pipe.step(workload.x, workload.target)
        # Used at once, without waiting: the caller's streams are ordered behind the step.
        grads = [p.grad.cpu() for p in model.parameters()]
        assert abs(result.loss.cpu() - workload.loss) < 1e-10
        assert (result.outputs.cpu() - workload.outputs).abs().max() < 1e-10
        report = (await result.completed()).report
    assert all((g - w).abs().max() < 1e-10 for g, w in zip(grads, workload.gradients, strict=True))
    assert len(report.tasks) == len(result.record.graph.tasks)
    assert 0 < report.bound <= report.seconds * 1.001


async def test_the_optimizer_may_follow_at_once(workload):
    """Steps and updates are queued without a host synchronisation, and give the CPU's results."""
    model, bare = workload.model(), workload.model()
    ours, theirs = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(bare.parameters(), lr=0.1)
    x, target = workload.x.cuda(), workload.target.cuda()
    async with Pipeline(model, ["cuda:0", "cuda:0"], microbatches=3, loss_fn=mse) as pipe:
        for _ in range(20):
            result = await pipe.step(x, target, return_outputs=False)
            ours.step()
            ours.zero_grad()
            mse(bare(workload.x), workload.target).backward()
            theirs.step()
            theirs.zero_grad()
        await result.completed()
    for a, b in zip(model.parameters(), bare.parameters(), strict=True):
        assert (a.cpu() - b).abs().max() < 1e-10


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], ["cpu:0", "cuda:0"]], ids="-".join)
async def test_recomputation_repeats_dropout(workload, devices):
    gradients = []
    for checkpoint in ("never", "always"):
        model = workload.model(dropout=0.5)
        async with Pipeline(model, devices, microbatches=4, checkpoint=checkpoint, loss_fn=mse) as pipe:
            torch.manual_seed(3)
            await (await pipe.step(workload.x, workload.target)).completed()
        gradients.append([p.grad.cpu() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


async def test_a_failure_and_then_a_step(workload, before_task):
    def fault(task):
        if task.id == "B(2,0)":
            raise ValueError("no")

    model = workload.model()
    async with Pipeline(model, ["cuda:0", "cuda:0"], microbatches=4, loss_fn=mse) as pipe:
        before_task(fault)
        with pytest.raises(TaskError, match="no"):
            await pipe.step(workload.x, workload.target)
        assert all(p.grad is None for p in model.parameters())
        before_task(lambda task: None)
        await (await pipe.step(workload.x, workload.target)).completed()
    assert all(
        (p.grad.cpu() - w).abs().max() < 1e-10 for p, w in zip(model.parameters(), workload.gradients, strict=True)
    )


async def test_memory_is_constant(workload):
    model = workload.model()
    async with Pipeline(model, ["cuda:0", "cuda:0"], microbatches=4, loss_fn=mse) as pipe:
        seen = set()
        for number in range(100):
            await (await pipe.step(workload.x, workload.target)).completed()
            model.zero_grad()
            gc.collect()
            if number >= 10:
                seen.add(torch.cuda.memory_allocated())
    assert len(seen) == 1


BUSY = 200_000_000
"""Device cycles: some 100 ms."""


async def test_a_pinned_batch_may_be_overwritten_when_the_step_returns(workload):
    """The caller's stream, behind which the copies read it, is late."""
    async with Pipeline(workload.model(), ["cuda:0", "cuda:0"], microbatches=4, loss_fn=mse) as pipe:
        for pin in (False, True, True):
            x, target = (t.clone().pin_memory() if pin else t.clone() for t in (workload.x, workload.target))
            torch.cuda._sleep(BUSY)
            result = await pipe.step(x, target)
            x.fill_(torch.nan)
            target.fill_(torch.nan)
            assert abs(result.loss.cpu() - workload.loss) < 1e-10


async def test_a_loss_does_not_wait_for_the_next_step(workload):
    """Whose first forward keeps the device busy."""
    model, ends, next_is_queued = workload.model().eval(), [], threading.Event()

    class Late(nn.Module):
        def forward(self, x):
            torch.cuda._sleep(BUSY if ends else 1)
            ends.append(torch.cuda.current_stream().record_event())
            if len(ends) == 2:
                next_is_queued.set()
            return x

    devices, x = ["cuda:0", "cuda:0"], workload.x.cuda()
    async with Pipeline(nn.Sequential(Late(), *model), devices, microbatches=1, loss_fn=mse) as pipe:
        steps = pipe.steps([(x, workload.target.cuda())] * 2)
        first = await anext(steps)
        await asyncio.to_thread(next_is_queued.wait, 20)
        assert abs(float(first.loss) - workload.loss) < 1e-10
        assert not ends[1].query(), "the next step is still busy, or the test shows nothing"
        assert len([result async for result in steps]) == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second GPU")
def test_a_pipeline_on_the_second_gpu_makes_no_context_on_the_first():
    code = """
import torch, asyncpipe
torch.cuda.set_device(1)
layers, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.randn(4, 4)
mse = torch.nn.functional.mse_loss
with asyncpipe.Pipeline(torch.nn.Sequential(*layers), ["cuda:1"] * 2, microbatches=2, loss_fn=mse).sync() as pipe:
    for _ in range(3):
        pipe.step(x.pin_memory(), x).wait()
assert not torch._C._cuda_hasPrimaryContext(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
