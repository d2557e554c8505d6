"""Models cut by tracing: the stages, run in order, compute what the model does, for other sizes and in both modes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint
from torch.nn import functional

from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.ops.model.stage import StagedModel
from asyncpipe.ops.model.trace.trace import trace

Run = Callable[[StagedModel, Arguments], Any]
Check = Callable[[nn.Module, StagedModel, Arguments], Any]

pytestmark = pytest.mark.usefixtures("seeded")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.third(x + self.second(x).relu())


@pytest.mark.parametrize("split", [1, 2, 3, ["third"], {"first": SplitPoint.END}])
def test_a_residual_that_spans_stages(split: Any, check: Check) -> None:
    model = Residual()
    staged = trace(model, Arguments.of(torch.randn(3, 4)), split)
    for samples in (3, 5, 1):
        check(model, staged, Arguments.of(torch.randn(samples, 4)))


class Fan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shared = self.a(x)
        return self.d(self.c(self.b(shared) * shared) + shared) * shared


def test_a_value_goes_straight_to_each_of_its_users(check: Check) -> None:
    model = Fan()
    staged = trace(model, Arguments.of(torch.randn(2, 3)), ["b", "c", "d"])
    assert staged.links == ((0, 1), (0, 2), (0, 3), (1, 2), (2, 3))
    assert list(staged.caller_values(Arguments.of(torch.randn(2, 3)))) == [0]
    check(model, staged, Arguments.of(torch.randn(4, 3)))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.top = nn.Linear(3, 3), nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, left: Tensor, *, right: Tensor) -> tuple[Tensor, ...]:
        x, y = self.left(left), self.right(right)
        return self.top(x * y), y, right, left


def test_inputs_go_to_the_stages_that_use_them(check: Check) -> None:
    model = Towers()
    left, right = torch.randn(3, 3), torch.randn(3, 2)
    staged = trace(model, Arguments.of(left, right=right), ["right", "top"])
    assert staged.links == ((0, 1), (1, 2))
    caller_values = staged.caller_values(Arguments.of(left, right=right))
    assert {stage: [id(value) for value in values] for stage, values in caller_values.items()} == {
        0: [id(left)],
        1: [id(right)],
        2: [id(left), id(right)],
    }
    output = check(model, staged, Arguments.of(left, right=right))
    assert output[3] is left


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        count = (x > 0).nonzero().shape[0]
        return self.b(self.a(x)) * count, count


def test_sizes_that_depend_on_values_travel_as_numbers(check: Check, run_stages: Run) -> None:
    model = Counting()
    staged = trace(model, Arguments.of(torch.randn(3, 3)), ["b"])
    check(model, staged, Arguments.of(torch.rand(5, 3)))
    assert run_stages(staged, Arguments.of(torch.rand(4, 3)))[1] == 12


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.b(self.a(self.b(x).tanh())))


def test_a_submodule_that_is_called_twice_is_split_at_its_first_call(check: Check) -> None:
    model = Twice()
    staged = trace(model, Arguments.of(torch.randn(2, 3)), ["a"])
    assert [set(dict(stage.named_parameters())) for stage in staged.stages] == [
        {"b.weight", "b.bias"},
        {"a.weight", "a.bias", "b.weight", "b.bias"},
    ]
    check(model, staged, Arguments.of(torch.randn(3, 3)))
    staged = trace(model, Arguments.of(torch.randn(2, 3)), {"b": SplitPoint.END, "a": SplitPoint.END})
    assert len(staged.stages) == 3
    check(model, staged, Arguments.of(torch.randn(3, 3)))


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3).float(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = functional.dropout(self.a(x) + torch.ones(3), 0.5, self.training)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.b((x + y).float())
            assert z.dtype is torch.bfloat16
        return self.c(z.double()) + y.detach()


@pytest.mark.parametrize("split", [["b"], 3])
def test_grad_modes_and_autocast_inside(split: Any, check: Check, run_stages: Run) -> None:
    model = Regions()
    staged = trace(model, Arguments.of(torch.randn(2, 3)), split)
    for training in (True, False):
        model.train(training)
        check(model, staged, Arguments.of(torch.randn(4, 3)))
    copies = pickle.loads(pickle.dumps(list(staged.stages)))
    assert (
        run_stages(StagedModel(model, copies, staged.links, staged.caller_values), Arguments.of(torch.randn(4, 3)))
        is not None
    )
