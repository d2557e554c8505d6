"""``torch.utils.checkpoint`` inside stages: the gradients are those of the unsplit model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from samples import pairs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from asyncpipe import Pipeline

# In a first run, which records no graph, torch's checkpoint warns that it would make no gradients.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

MICROBATCHES = 4
mse = nn.functional.mse_loss


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=self.reentrant)


class Beside(nn.Module):
    """Checkpoints what does not depend on its input, so that W alone runs it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.layer = nn.Linear(6, 6)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return x @ checkpoint(self.layer, self.weight, use_reentrant=self.reentrant)


def first(reentrant: bool) -> nn.Sequential:
    """The first layer is checkpointed; it has gradients where the caller's input requires one."""
    return nn.Sequential(Checkpointed(reentrant), nn.Linear(6, 6), nn.Tanh(), Checkpointed(reentrant))


def inner(reentrant: bool) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), Checkpointed(reentrant), nn.Tanh(), Checkpointed(reentrant))


def beside(reentrant: bool) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), Beside(reentrant), nn.Tanh(), Beside(reentrant))


@pytest.mark.promise("Right results", "`torch.utils.checkpoint` inside a stage does not change the gradients.")
@pairs(
    ("mode", ["always", "except_last", "never"]),
    ("face", ["gpipe", "zb-h1", "call"]),
    ("reentrant", [True, False]),
    ("make", [first, inner, beside]),
)
def test_gradients(make: Callable[[bool], nn.Sequential], reentrant: bool, face: str, mode: str) -> None:
    torch.manual_seed(0)
    model = make(reentrant).double()
    alone = copy.deepcopy(model)
    x, target = torch.randn(8, 6).double().requires_grad_(), torch.randn(8, 6).double()
    for piece, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        (mse(alone(piece), wanted) / MICROBATCHES).backward()
    schedule = "gpipe" if face == "call" else face
    pipe = Pipeline(
        model,
        ["cpu:0", "cpu:1"],
        balance=[2, 2],
        schedule=schedule,
        microbatches=MICROBATCHES,
        checkpoint=mode,
        loss_fn=mse,
    )
    with pipe.sync() as opened:
        if face == "call":
            mse(opened(x), target).backward()
        else:
            opened.step(x, target)
    for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert parameter.grad is not None, name
        assert torch.allclose(parameter.grad, other.grad, atol=1e-10, rtol=0), name
