"""Measured layers: times by a fake clock, what layers pass to each other, and a model that does not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.errors import BalanceError
from asyncpipe.ops.model.batchnorm import DeferredBatchNorm1d
from asyncpipe.ops.model.measure_layers import balance_by_size, balance_by_time, layer_bytes, layer_times
from asyncpipe.ops.model.skips import Namespace, pop, skippable, stash

FLOAT = 4
"""Bytes of a float32."""


class Clock:
    """A clock that only layers advance. Copies of a layer share it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def __deepcopy__(self, memo: dict[int, Any]) -> Clock:
        return self


class _Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, forward: float, backward: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, backward
        clock.now += forward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.now += ctx.seconds
        return grads[0], None, None, None


class Takes(nn.Module):
    """A layer whose forward and backward take so many seconds of the clock."""

    def __init__(self, clock: Clock, forward: float, backward: float = 0.0, weight: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1), requires_grad=weight)
        self.seconds = forward, backward
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Passing.apply(x * self.weight, self.clock, *self.seconds)  # type: ignore[no-untyped-call]
        return result


class Calls(nn.Module):
    """A layer without state of its own that calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def times(*layers: nn.Module, sample: Any = None, seconds: float = 0.0, clock: Clock | None = None) -> list[float]:
    sample = torch.ones(2, 3) if sample is None else sample
    return layer_times(nn.Sequential(*layers), sample, seconds=seconds, clock=clock or Clock())


# Times


def test_forward_and_backward_of_each_layer() -> None:
    clock = Clock()
    layers = [Takes(clock, 1, 2), Takes(clock, 0.5, 0.25), nn.ReLU(inplace=True), Takes(clock, 0, 8)]
    assert times(*layers, clock=clock) == [3, 0.75, 0, 8]


# Values between layers


@skippable(stash=["kept"])
class Stashes(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("kept", x * 2)
        return x


@skippable(pop=["kept"])
class Pops(nn.Module):
    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__()
        self.late = None if clock is None else Takes(clock, 1, 2)

    def forward(self, x: Tensor) -> Any:
        kept = yield pop("kept")
        kept += 1
        return x + kept if self.late is None else self.late(x + kept)


def test_skips_reach_their_layer() -> None:
    clock, outer, inner = Clock(), Namespace(), Namespace()
    layers = [
        Takes(clock, 1, 2),
        Stashes().isolate(outer),
        Stashes().isolate(inner),
        Pops(clock).isolate(inner),
        Pops().isolate(outer),
    ]
    assert times(*layers, seconds=12, clock=clock) == [3, 0, 0, 3, 0]
    # What a layer stashes is output too: 2 × 3 numbers beside those that it returns.
    assert layer_bytes(nn.Sequential(*layers), torch.ones(2, 3))[1] == 2 * (2 * 3) * FLOAT


# Nothing changes


class Restless(nn.Module):
    """A layer that changes everything that a layer can change about itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        self.train(not self.training)
        with torch.no_grad():
            self.weight.add_(1)
        return x * self.weight + torch.rand_like(x)


def measure_time(model: nn.Sequential, sample: Any) -> None:
    layer_times(model, sample, seconds=0)


def measure_size(model: nn.Sequential, sample: Any) -> None:
    layer_bytes(model, sample, microbatches=2)


@pytest.mark.parametrize("measure", [measure_time, measure_size])
def test_the_model_is_left_as_it_was(measure: Callable[[nn.Sequential, Any], None]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), DeferredBatchNorm1d(3), Restless(), nn.Dropout())
    model[1].eval()
    sample = torch.randn(4, 3, requires_grad=True)
    model[0].weight.grad = torch.ones(3, 3)
    gradients = [parameter.grad for parameter in model.parameters()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    generator = torch.get_rng_state()
    measure(model, sample)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    after = [parameter.grad for parameter in model.parameters()]
    assert all(now is then for now, then in zip(after, gradients, strict=True))
    assert torch.equal(model[0].weight.grad, torch.ones(3, 3))
    assert sample.grad is None
    assert [module.training for module in model.modules()] == modes
    assert model[3].count == 0
    assert model[2].gathered is None


# Errors


@pytest.mark.parametrize("balance", [balance_by_time, balance_by_size])
@pytest.mark.parametrize("stages", [0, 3])
def test_a_layer_a_stage_before_anything_runs(balance: Callable[..., Any], stages: int) -> None:
    calls: list[Any] = []
    model = nn.Sequential(Calls(calls.append), nn.ReLU())
    with pytest.raises(BalanceError, match=f"cannot split 2 layers into {stages} stages"):
        balance(stages, model, torch.ones(1))
    assert calls == []
