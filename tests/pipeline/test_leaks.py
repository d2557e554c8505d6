"""Steps leave nothing behind: live tensors and threads are constant after the first."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
import torch
from fault_helpers import live_tensors
from torch import nn

from asyncpipe import Pipeline, TaskError
from asyncpipe.testing import InlineExecutor

mse = nn.functional.mse_loss


async def test_two_hundred_steps_leave_nothing_behind(workload, new_threads):
    model = workload.model()
    async with Pipeline(model, ["cpu:0", "cpu:1"], microbatches=3, loss_fn=mse) as pipe:
        counts = []
        for number in range(200):
            result = await pipe.step(workload.x, workload.target)
            if number % 50 == 1 or number == 199:
                del result
                counts.append((live_tensors(), new_threads(), len(asyncio.all_tasks())))
    assert len(set(counts)) == 1


async def test_an_idle_pipeline_keeps_no_batch(workload):
    x, target = workload.x.clone(), workload.target.clone()
    dead = weakref.ref(x), weakref.ref(target)
    async with Pipeline(workload.model(), ["cpu:0", "cpu:1"], microbatches=3, loss_fn=mse) as pipe:
        result = await pipe.step(x, target)
        output = weakref.ref(result.outputs)
        del x, target, result
        gc.collect()
        assert [ref() for ref in (*dead, output)] == [None] * 3


async def test_graphs_of_uneven_batches_are_kept_once(workload):
    async with Pipeline(workload.model(), ["cpu:0", "cpu:1"], microbatches=4, loss_fn=mse) as pipe:
        graphs = set()
        for size in (12, 3, 2, 12, 3, 2, 11):
            result = await pipe.step(workload.x[:size], workload.target[:size])
            graphs.add(id(result.record.graph))
        assert len(graphs) == 3


async def test_activations_are_dropped_as_the_graph_says(workload):
    """1F1B holds p - stage micro-batches of activations, not m: count what autograd saves."""
    live, peak = 0, 0

    class Kept:
        def __init__(self, tensor):
            nonlocal live, peak
            self.tensor = tensor
            live += 1
            peak = max(peak, live)

        def __del__(self):
            nonlocal live
            live -= 1

    class Saving(nn.Module):
        def forward(self, x):
            with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
                return torch.tanh(x * x)

    layers = [nn.Sequential(nn.Linear(6, 6).double(), Saving()), nn.Sequential(nn.Linear(6, 8).double(), nn.Tanh())]
    peaks = {}
    for schedule in ("gpipe", "1f1b"):
        async with Pipeline(
            layers, ["cpu:0", "cpu:1"], microbatches=6, schedule=schedule, checkpoint="never", loss_fn=mse
        ) as pipe:
            live, peak = 0, 0
            result = await pipe.step(workload.x, workload.target)
            peaks[schedule] = peak
            assert result.report.peak_in_flight == ((6, 6) if schedule == "gpipe" else (2, 1))
    assert live == 0
    assert peaks["gpipe"] == 3 * peaks["1f1b"]


async def test_a_backward_drops_what_its_forward_kept(workload, before_task):
    """In the steady state of 1F1B every micro-batch finds as many live tensors as the one before."""
    counts = {}

    def count(task):
        if task.kind == "B" and task.stage == 1:
            counts[task.microbatch] = live_tensors()

    before_task(count)
    devices = ["cpu:0", "cpu:1"]
    options = {"microbatches": 8, "checkpoint": "never", "loss_fn": mse, "executors": InlineExecutor}
    async with Pipeline(workload.model(), devices, **options) as pipe:
        for _ in range(2):  # The first forward of a stage has copies of what it receives.
            await pipe.step(workload.x[:8], workload.target[:8], return_outputs=False)
    # Each micro-batch adds its loss to what stays for the whole step, and takes its input and target out of it: two
    # micro-batches on (the order of the stages' turns alternates), two tensors fewer are alive.
    assert [counts[i + 2] for i in range(6)] == [counts[i] - 2 for i in range(6)], str(counts)


class _Fault(Exception):
    """Can be referred to weakly, unlike the built-in ones."""


class _Faulty(nn.Module):
    """Fails in its forward or in its backward."""

    backward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.backward:
            raise _Fault
        x = x * 1
        if x.requires_grad:
            x.register_hook(self._fail)
        return x

    def _fail(self, gradient: torch.Tensor) -> None:
        raise _Fault


@pytest.mark.parametrize("how", ["step", "call"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_errors_and_pipelines_need_no_cycle_collector(how, checkpoint):
    faulty = _Faulty()
    model = nn.Sequential(nn.Linear(2, 2), faulty, nn.Linear(2, 2))
    gc.collect()
    gc.disable()
    try:
        pipe = Pipeline(model, ["cpu:0", "cpu:1"], microbatches=2, checkpoint=checkpoint, loss_fn=lambda y: y.sum())
        seen = [weakref.ref(pipe)]
        with pipe.sync() as opened:
            for faulty.backward in (False, True):
                try:
                    opened.step(torch.ones(4, 2)) if how == "step" else opened(torch.ones(4, 2)).sum().backward()
                except TaskError as error:
                    seen += [weakref.ref(error), weakref.ref(error.__cause__)]
        del opened, pipe
        assert [reference() for reference in seen] == [None] * 5
    finally:
        gc.enable()
