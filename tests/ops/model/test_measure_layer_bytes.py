"""Sizes of layers, against those by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from asyncpipe.ops.model.measure_layers import balance_by_size, layer_bytes

FLOAT = 4
"""Bytes of a float32."""


def test_sizes_by_hand() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5), nn.Flatten())
    batch = 8
    saved = [batch * 10, 0, batch * 20, 0]  # A ReLU saves its output.
    outputs = [batch * 20, batch * 20, batch * 5, batch * 5]
    parameters = [10 * 20 + 20, 0, 20 * 5 + 5, 0]
    for scale in (0, 0.5, 2, 4):
        got = layer_bytes(model, torch.randn(batch, 10), parameter_scale=scale)
        assert got == [FLOAT * (s + o + scale * p) for s, o, p in zip(saved, outputs, parameters, strict=True)]
    assert layer_bytes(model, torch.randn(batch, 10)) == layer_bytes(model, torch.randn(batch, 10), parameter_scale=2)


class Keeps(torch.autograd.Function):
    """Its context keeps what no hook of autograd sees."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = x.repeat(1, 3)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.kept.mean()


class KeepsInContext(nn.Module):
    def forward(self, x):
        return Keeps.apply(x)


class KeepsInModule(nn.Module):
    def forward(self, x):
        self.kept = x.detach().repeat(1, 3)
        return x * 2


class KeepsInput(nn.Module):
    def forward(self, x):
        return checkpoint(torch.tanh, x, use_reentrant=False)


@pytest.mark.parametrize(("layer", "kept"), [(KeepsInContext, 3), (KeepsInModule, 3), (KeepsInput, 1)])
def test_what_a_forward_makes_and_keeps_is_counted(layer, kept) -> None:
    assert layer_bytes(nn.Sequential(layer()), torch.randn(8, 10, requires_grad=True)) == [FLOAT * 80 * (1 + kept)]


@pytest.mark.parametrize(("microbatches", "largest"), [(1, 8), (3, 3), (4, 2), (100, 1)])
def test_activations_are_those_of_the_largest_micro_batch(microbatches: int, largest: int) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    sizes = layer_bytes(model, torch.randn(8, 3), microbatches=microbatches, parameter_scale=0)
    assert sizes == [largest * (3 + 2) * FLOAT]


def test_stages_of_even_size() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2), nn.ReLU())
    few, many = torch.randn(1, 4), torch.randn(10_000, 4)
    # With one sample the parameters decide, with many the activations.
    assert layer_bytes(model, few) == [192, 16, 2832, 256, 1304, 8]
    assert balance_by_size(3, model, few) == [2, 1, 3]
    assert balance_by_size(3, model, few, parameter_scale=0) == [3, 1, 2]
    assert balance_by_size(3, model, many) == [3, 1, 2]
    assert balance_by_size(3, model, many, microbatches=10_000) == [2, 1, 3]
    assert balance_by_size(3, model, many.unsqueeze(0), microbatches=10_000, batch_dim=1) == [2, 1, 3]
