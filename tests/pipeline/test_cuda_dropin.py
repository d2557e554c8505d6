"""Calls, skips, ties, updates and mixed precision on CUDA devices, alone and mixed with the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from asyncpipe import Pipeline, pop, skippable, stash
from asyncpipe.errors import BackwardError

pytestmark = pytest.mark.cuda
mse = nn.functional.mse_loss
DEVICES = [["cuda:0", "cuda:0", "cuda:0"], ["cuda:0", "cpu:0", "cuda:0"], ["cpu:0", "cuda:0", "cpu:1"]]
MODES = ["always", "except_last", "never"]


@skippable(stash=["kept"])
class Keep(nn.Module):
    def forward(self, x):
        yield stash("kept", x)
        return x


@skippable(pop=["kept"])
class Add(nn.Module):
    def forward(self, x):
        return x + (yield pop("kept"))


class Tied(nn.Module):
    def __init__(self, first: nn.Linear) -> None:
        super().__init__()
        self.weight = first.weight

    def forward(self, x):
        return x @ self.weight


def make_model() -> nn.Sequential:
    torch.manual_seed(8)
    first = nn.Linear(6, 6)
    return nn.Sequential(first, Keep(), nn.Linear(6, 6), nn.Tanh(), Tied(first), Add()).double()


def worst(model: nn.Module, bare: nn.Module) -> float:
    pairs = zip(model.parameters(), bare.parameters(), strict=True)
    return max(float((ours.grad.cpu() - theirs.grad).abs().max()) for ours, theirs in pairs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("devices", DEVICES, ids="-".join)
def test_calls(devices, mode):
    model, bare = make_model(), make_model()
    before = nn.Linear(6, 6).double()
    bare_before = copy.deepcopy(before)
    before.to("cuda:0")
    x = torch.randn(9, 6, dtype=torch.float64)
    bare(bare_before(x)).square().mean().backward()
    with Pipeline(model, devices, microbatches=4, balance=[2, 2, 2], checkpoint=mode).sync() as pipe:
        for _ in range(3):
            model.zero_grad()
            before.zero_grad()
            output = pipe(before(x.to("cuda:0")))
            output.square().mean().backward()
        assert worst(model, bare) < 1e-10
        assert worst(before, bare_before) < 1e-10
        loss = pipe(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(BackwardError):
            loss.backward()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("devices", DEVICES, ids="-".join)
async def test_steps_with_an_optimizer_inside(devices, mode):
    model, bare = make_model(), make_model()
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.5)
    x = torch.randn(9, 6, dtype=torch.float64)

    def loss_fn(output):
        return output.square().mean(), output.numel()

    async with Pipeline(
        model,
        devices,
        microbatches=4,
        balance=[2, 2, 2],
        checkpoint=mode,
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    ) as pipe:
        for _ in range(5):
            result = await pipe.step(x)
            loss_fn(bare(x))[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        await result.completed()
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert (ours.cpu() - theirs).abs().max() < 1e-10


def test_gradient_scaler_and_autocast():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    x, target = torch.randn(16, 16, device="cuda"), torch.randn(16, 4, device="cuda")
    scaler = torch.amp.GradScaler("cuda")
    with Pipeline(model, ["cuda:0", "cuda:0"], microbatches=4, loss_fn=mse).sync() as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses = []
        for inside in (True, False) * 10:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = pipe.step(x, target, scaler=scaler).loss if inside else mse(pipe(x), target)
            if not inside:
                scaler.scale(loss).backward()
            losses.append(float(loss.detach()))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert losses[-1] < losses[0]


def test_deferred_batch_norm():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)).double()
    bare, x = copy.deepcopy(model), torch.randn(12, 6, dtype=torch.float64)
    bare(x)
    with Pipeline(model, ["cuda:0", "cuda:0"], microbatches=4, deferred_batch_norm=True).sync() as pipe:
        pipe(x).sum().backward()
    for ours, theirs in zip(model.buffers(), bare.buffers(), strict=True):
        assert (ours.cpu() - theirs).abs().max() < 1e-10
