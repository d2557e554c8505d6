"""torchgpipe's balance tools, under its names, give balances for ``GPipe``."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from asyncpipe.compat.torchgpipe import GPipe
from asyncpipe.compat.torchgpipe.balance import balance_by_size, balance_by_time, balance_cost
from asyncpipe.ops.model import measure_layers as profile


def test_cost():
    assert balance_cost([1, 2, 3, 4, 5, 6], 2) == [4, 2]
    assert balance_cost(cost=[0, 0], partitions=2) == [1, 1]
    with pytest.raises(ValueError, match="cannot split"):
        balance_cost([42], 2)


class Repeats(nn.Module):
    """A layer that takes ``times`` seconds of a clock of its own, and as much memory as ``times`` with 1."""

    now = 0.0

    def __init__(self, times):
        super().__init__()
        self.times = times

    def forward(self, x):
        Repeats.now += self.times
        for _ in range(self.times):
            x = x.sin()
        return x


@pytest.mark.parametrize("order", [1, -1])
def test_by_time_and_by_size(monkeypatch, order):
    timed = partial(profile.balance_by_time, clock=lambda: Repeats.now)
    monkeypatch.setattr(profile, "balance_by_time", timed)
    model = nn.Sequential(*[Repeats(times) for times in (1, 1, 1, 60)][::order])
    sample = torch.rand(8, 1000, requires_grad=True)
    wanted = [3, 1][::order]
    assert balance_by_time(2, model, sample, timeout=0.05, device="cpu") == wanted
    assert sum(balance_by_time(partitions=2, module=model, sample=sample, timeout=0)) == 4
    assert balance_by_size(2, model, sample, chunks=2, param_scale=4.0, device=torch.device("cpu")) == wanted
    assert balance_by_size(partitions=2, module=model, input=sample) == wanted
    assert GPipe(model, wanted, devices=["cpu", "cpu"], chunks=2)(sample).shape == sample.shape


def test_a_tuple_is_one_argument():
    class Twin(nn.Module):
        def forward(self, pair):
            a, b = pair
            return a + b, (a + b).detach()

    pair = torch.rand(2, 1, requires_grad=True), torch.rand(2, 1)
    assert sorted(balance_by_time(2, nn.Sequential(Twin(), Twin(), Twin()), pair, timeout=0)) == [1, 2]
