"""Gradients and losses are those of the unsplit model, whatever the schedule, split and recomputation."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from samples import each_value
from shapes import ALL
from torch import nn

from asyncpipe import Pipeline
from asyncpipe.errors import RecomputeError, TaskError
from asyncpipe.testing import InlineExecutor

MODES = ("always", "except_last", "selective", "never")
mse = nn.functional.mse_loss


# (schedule, stages, devices)
SHAPES = [
    *(("gpipe", 1, 1), ("gpipe", 3, 3), ("1f1b", 2, 2), ("1f1b", 4, 4)),
    *(("interleaved", 2, 1), ("interleaved", 3, 3), ("interleaved", 4, 2)),
]


def pipeline(model: nn.Module, stages: int, devices: int, **options: Any) -> Pipeline:
    return Pipeline(model, [f"cpu:{k}" for k in range(devices)], stages=stages, loss_fn=mse, **options)


@pytest.mark.promise(
    "Right results",
    "Loss and gradients are those of the unsplit model within 1e-10, for every schedule, split and recomputation mode.",
)
@each_value(("samples", [13, 5]), ("schedule, stages, devices", SHAPES))
async def test_equal_to_the_unsplit_model(workloads, schedule, stages, devices, samples):
    workload = workloads(samples)
    some = (("always", 3), ("except_last", 8), ("selective", 3), ("never", 1), ("never", 8))
    for mode, microbatches in itertools.product(MODES, range(1, 9)) if ALL else some:
        threaded, inline = workload.model(), workload.model()
        options = {"schedule": schedule, "checkpoint": mode, "microbatches": microbatches}
        async with pipeline(threaded, stages, devices, **options) as pipe:
            result = await pipe.step(workload.x, workload.target)
        async with pipeline(inline, stages, devices, executors=InlineExecutor, **options) as pipe:
            one_by_one = await pipe.step(workload.x, workload.target)
        case = f"{mode}, {microbatches} micro-batches"
        assert workload.worst(threaded) < 1e-10, case
        assert abs(result.loss - workload.loss) < 1e-10, case
        assert (result.outputs - workload.outputs).abs().max() < 1e-10, case
        assert torch.equal(result.loss, one_by_one.loss), case
        for ours, theirs in zip(threaded.parameters(), inline.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad), case
        assert len(result.losses) == min(microbatches, samples)


async def test_dropout_differs_between_steps_and_microbatches():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5))
    async with Pipeline(model, ["cpu:0"], microbatches=2, checkpoint="never", loss_fn=lambda y: y.sum()) as pipe:
        with torch.no_grad():
            first = (await pipe.step(torch.ones(2, 64))).outputs
            second = (await pipe.step(torch.ones(2, 64))).outputs
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, second)


@pytest.mark.promise(
    "Bit-identical results",
    "A recomputation sees the input, buffers, draws and autocast of its forward: gradients are bit-identical.",
)
@pytest.mark.parametrize("mode", MODES)
async def test_autocast_of_the_caller_holds_in_every_task(mode):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    x = torch.randn(4, 16)
    seen = []

    def loss_fn(output, target):
        seen.append(output.dtype)
        return mse(output.float(), target)

    async with Pipeline(model, ["cpu:0", "cpu:1"], microbatches=2, checkpoint=mode, loss_fn=loss_fn) as pipe:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            await pipe.step(x, x)
        grads = [p.grad.clone() for p in model.parameters()]
    assert set(seen) == {torch.bfloat16}
    model.zero_grad()
    for rows in x.split(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mse(model(rows).float(), rows) / 2
        loss.backward()
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)


@pytest.mark.promise("Right results", "A stage in which nothing needs a gradient is not recomputed.")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_a_stage_in_which_nothing_needs_a_gradient_is_not_recomputed(mode, schedule):
    called: list[str] = []
    frozen = nn.Linear(6, 6).requires_grad_(False)
    frozen.register_forward_hook(lambda *_: called.append("forward"))
    model = nn.Sequential(frozen, nn.Tanh(), nn.Linear(6, 6))
    model[1].register_full_backward_hook(lambda *_: called.append("backward"))
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    mse(model(x), y).backward()
    assert called == ["forward"], "as without a pipeline"
    wanted, model[2].weight.grad = model[2].weight.grad, None
    options = {"balance": [1, 2], "microbatches": 2, "schedule": schedule, "checkpoint": mode, "loss_fn": mse}
    with Pipeline(model, ["cpu:0", "cpu:1"], **options).sync() as pipe:
        pipe.step(x, y)
    assert called == ["forward"] * 3
    torch.testing.assert_close(model[2].weight.grad, wanted)


class AsksForGraph(nn.Module):
    def forward(self, x):
        return 2 * x if x.requires_grad else x


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.calls * x


@pytest.mark.promise("Refused, not wrong", "A recomputation whose results differ from those of its forward is refused.")
@pytest.mark.parametrize("mode", ["always", "except_last"])
@pytest.mark.parametrize("layer", [AsksForGraph, Counts])
def test_a_recomputation_that_computes_other_values_is_refused(layer, mode):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), layer())
    with Pipeline(
        model, ["cpu:0", "cpu:1"], balance=[1, 2], microbatches=2, checkpoint=mode, loss_fn=mse
    ).sync() as pipe:
        with pytest.raises(TaskError, match="stage 1 computed other values when it was recomputed") as raised:
            pipe.step(torch.randn(2, 2), torch.randn(2, 2))
        assert isinstance(raised.value.__cause__, RecomputeError)
        with pytest.raises(TaskError, match="stage 1 computed other values when it was recomputed"):
            pipe(torch.randn(2, 2)).sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_layer_may_ask_for_the_graph_where_nothing_is_recomputed():
    model = nn.Sequential(nn.Linear(2, 2), AsksForGraph())
    x = torch.randn(2, 2)
    with Pipeline(model, ["cpu:0"], microbatches=1, checkpoint="never").sync() as pipe:
        torch.testing.assert_close(pipe(x), 2 * model[0](x))


class DoublesItsGradient(nn.Module):
    """Has a hook on the tensor that it returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.tanh()
        y.register_hook(lambda gradient: 2 * gradient)
        return y


class Force(nn.Module):
    """The gradient of an energy, which it asks autograd for in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (force,) = torch.autograd.grad(self.energy(x).square().sum(), x, create_graph=True)
        return x + force


@pytest.mark.promise(
    "Your own program",
    "If a stage computes a gradient inside its forward, hooks that earlier stages registered are not called.",
)
@pytest.mark.parametrize("balance", [[3], [1, 2], [2, 1]])
def test_a_hook_of_what_a_stage_receives_is_not_called_for_a_gradient_in_its_forward(balance: list[int]) -> None:
    model = nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), DoublesItsGradient(), Force())
    x = torch.randn(4, 3, dtype=torch.float64)
    wanted = model(x)
    with Pipeline(model, ["cpu"] * len(balance), microbatches=1, balance=balance).sync() as pipe:
        assert torch.equal(pipe(x), wanted) == (balance != [2, 1])


def test_autocast_ends_with_its_step_and_casts_weights_anew_in_the_next() -> None:
    layer, seen = nn.Linear(4, 4, bias=False), []
    layer.register_forward_hook(lambda module, given, output: seen.append(output.detach()))
    options: Any = {"microbatches": 1, "checkpoint": "never", "loss_fn": torch.sum}
    with Pipeline(nn.Sequential(layer), ["cpu:0"], **options).sync() as pipe:
        with torch.autocast("cpu"):
            for weight in (1.0, 2.0):
                nn.init.constant_(layer.weight, weight)
                pipe.step(torch.ones(1, 4))
        pipe.step(torch.ones(1, 4))
    assert [output.dtype for output in seen] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert [output.max().item() for output in seen] == [4.0, 8.0, 8.0]
