"""Conversion to deferred batch norm: what is replaced, what stays the same object, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.errors import OptionError
from asyncpipe.ops.model.batchnorm import (
    DeferredBatchNorm1d,
    convert_deferred_batch_norm,
    deferred_layers,
)


class Shared(nn.Module):
    """Uses one layer under two names, and in a nested module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.BatchNorm1d(2)
        self.body = nn.Sequential(nn.Linear(2, 2), self.first, nn.BatchNorm1d(2, track_running_stats=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.body(self.first(x)))


def test_conversion_shares_everything() -> None:
    model = Shared()
    bare, untracked = model.first, model.body[2]
    state = dict(model.state_dict(keep_vars=True))
    assert convert_deferred_batch_norm(model) is model
    assert model.first is model.second
    assert model.first is model.body[1]
    assert model.body[2] is untracked
    assert deferred_layers(model) == [model.first]
    assert isinstance(model.first, DeferredBatchNorm1d)
    converted = model.state_dict(keep_vars=True)
    assert list(converted) == list(state)
    assert all(converted[name] is tensor for name, tensor in state.items())
    assert model.first.weight is bare.weight
    assert model.first.running_mean is bare.running_mean
    deferred = model.first
    assert convert_deferred_batch_norm(model) is model
    assert model.first is deferred


def test_conversion_keeps_hooks_mode_and_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    calls: list[nn.Module] = []
    handle = model[1].register_forward_hook(lambda module, _inputs, _output: calls.append(module))
    convert_deferred_batch_norm(model)
    assert not model[1].training
    model(torch.randn(3, 2))
    assert calls == [model[1]]
    handle.remove()
    model(torch.randn(3, 2))
    assert len(calls) == 1


class Activated(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input).relu()


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.SyncBatchNorm(2), "layer '1.0' (SyncBatchNorm) gathers statistics from other processes"),
        (nn.LazyBatchNorm2d(), "layer '1.0' (LazyBatchNorm2d) has no parameters yet; call the model once"),
        (Activated(2), "layer '1.0' (Activated) cannot be deferred, since a subclass"),
    ],
)
def test_layers_that_cannot_be_deferred(layer: nn.Module, message: str) -> None:
    bare = nn.BatchNorm1d(2)
    model = nn.Sequential(bare, nn.Sequential(layer))
    with pytest.raises(OptionError) as raised:
        convert_deferred_batch_norm(model)
    assert str(raised.value).startswith(message)
    assert model[0] is bare
    with pytest.raises(OptionError, match=r"the module \("):
        convert_deferred_batch_norm(layer)
