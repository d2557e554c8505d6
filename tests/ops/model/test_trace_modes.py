"""Traced stages and the model's modes, buffers, random numbers, devices and copies."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.errors import TraceError
from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.ops.model.stage import StagedModel
from asyncpipe.ops.model.trace.trace import trace

Run = Callable[[StagedModel, Arguments], Any]
Check = Callable[[nn.Module, StagedModel, Arguments], Any]

pytestmark = pytest.mark.usefixtures("seeded")

# Modes


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True)
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.relu(self.norm(self.conv(x))).mean((2, 3))))


@pytest.mark.parametrize("split", [3, ["relu"]])
def test_batch_norm_and_dropout_in_both_modes(split: Any, check: Check, run_stages: Run) -> None:
    model = Normed()
    staged = trace(model, Arguments.of(torch.randn(2, 2, 5, 5)), split, dynamic="all")
    check(model, staged, Arguments.of(torch.randn(4, 2, 6, 5)))
    assert model.norm.num_batches_tracked == 1
    assert not torch.equal(model.norm.running_mean, torch.zeros(3))
    model.eval()
    x = torch.randn(3, 2, 5, 6)
    assert torch.equal(check(model, staged, Arguments.of(x)), run_stages(staged, Arguments.of(x)))
    model.train()
    assert not torch.equal(run_stages(staged, Arguments.of(x)), run_stages(staged, Arguments.of(x)))


def test_tracing_leaves_the_model_and_the_generators_alone() -> None:
    model = Normed()
    state, attributes = copy.deepcopy(model.state_dict()), {name: set(vars(m)) for name, m in model.named_modules()}
    generator = torch.get_rng_state()
    trace(model, Arguments.of(torch.randn(2, 2, 5, 5, generator=torch.Generator())), 2)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
    assert all(parameter.grad is None for parameter in model.parameters())


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.unused(x)
        return self.a(x)


# From torch 2.10 on.
@pytest.mark.filterwarnings("ignore:The tensor attribute self.model.last was assigned during export")
def test_what_a_forward_leaves_behind_is_neither_kept_nor_computed() -> None:
    model = Remembering()
    staged = trace(model, Arguments.of(torch.randn(2, 3)), 1)
    assert not hasattr(model, "last")
    assert set(dict(staged.stages[0].named_parameters())) == {"a.weight", "a.bias"}


# Buffers and what is changed in place


class Constants(nn.Module):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("mask", torch.rand(3), persistent=False)
        self.plain, self.listed = torch.rand(3), [torch.rand(3)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) + torch.tensor([1.0, 2.0, 3.0] if self.training else [4.0, 5.0, 6.0])
        return self.b(x * self.mask) * self.plain + self.listed[0] + torch.tensor(3.0)


def test_buffers_and_constants(check: Check) -> None:
    model = Constants()
    staged = trace(model, Arguments.of(torch.randn(2, 3)), ["b"])
    for training in (True, False):
        model.train(training)
        check(model, staged, Arguments.of(torch.randn(4, 3)))
    assert dict(staged.stages[1].named_buffers())["plain"] is model.plain
    assert staged.stages[1].state_dict().keys() == {"b.weight", "b.bias"}


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.relu, self.b = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.a(x))
        return self.b(self.relu(y[:, :].view(-1, 4)))


def test_a_stage_that_overwrites_what_it_receives_says_so(check: Check) -> None:
    model = InPlace()
    x = Arguments.of(torch.randn(2, 4))
    assert [stage.overwrites_input for stage in trace(model, x, ["relu"]).stages] == [False, True]
    assert [stage.overwrites_input for stage in trace(model, x, ["dropout"]).stages] == [False, True]
    staged = trace(model, x, ["b"])
    assert [stage.overwrites_input for stage in staged.stages] == [False, False]
    check(model, staged, Arguments.of(torch.randn(3, 4)))


class SharedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=0.1), nn.Linear(3, 3)
        self.norm.num_batches_tracked = None

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(self.norm(self.a(x))))


def test_a_buffer_that_several_stages_change(check: Check) -> None:
    with pytest.raises(TraceError, match=r"'norm\.running_mean' is overwritten by stage 0 and used by stages 0, 1"):
        trace(SharedNorm(), Arguments.of(torch.randn(2, 3)), ["b"])
    model = SharedNorm()
    check(model, trace(model, Arguments.of(torch.randn(2, 3)), 1), Arguments.of(torch.randn(4, 3)))


# Placement and copies


class Factories(nn.Module):
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        x = x + torch.arange(x.shape[1], device=x.device) + torch.full((x.shape[0], 3), math.pi, dtype=x.dtype)
        with torch.no_grad():
            y = torch.ones(3).to(x.device)
        x = (x * 2).float().double()
        return self.norm(self.a(x)) + torch.tensor([1.0, 2.0, 3.0]) + y


def test_what_the_forward_makes_is_on_the_stages_device(run_stages: Run) -> None:
    model = Factories()
    staged = trace(model, Arguments.of(torch.randn(2, 3)), ["a"])
    for stage in staged.stages:
        stage.to("meta")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert dict(staged.stages[1].named_buffers())["norm.running_mean"] is model.norm.running_mean
    assert dict(staged.stages[0].named_buffers())["steps"] is model.steps
    output = run_stages(staged, Arguments.of(torch.randn(4, 3, device="meta")))
    assert output.is_meta
    assert output.shape == (4, 3)
