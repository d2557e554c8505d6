"""Fixtures that run stages and compare them with their model, for traces; and gradients to compare, for skips."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.ops.model.stage import CALLER, StagedModel


@pytest.fixture(scope="module")
def doubles() -> Iterator[None]:
    """Floats have 64 bits, and torch's log of traces is off, which pytest would capture very slowly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)  # For what is made once for a module.
        yield
        torch.set_default_dtype(torch.float32)


@pytest.fixture
def seeded(doubles: None) -> None:
    """Each test draws the same 64-bit numbers, in any order of tests."""
    torch.manual_seed(0)


@pytest.fixture
def run_stages() -> Callable[[StagedModel, Arguments], Any]:
    """A function for the output of the stages, run in order; what travels is checked against the links."""
    return _run_stages


def _run_stages(staged: StagedModel, arguments: Arguments) -> Any:
    caller_values = staged.caller_values(arguments)
    received: dict[int, dict[int, Any]] = {stage: {CALLER: values} for stage, values in caller_values.items()}
    last = len(staged.stages) - 1
    for index, stage in enumerate(staged.stages):
        sent = stage(received.pop(index, {}))
        targets = {user for source, user in staged.links if source == index}
        assert set(sent) == targets | ({CALLER} if index == last else set())
        for user in targets:
            received.setdefault(user, {})[index] = sent[user]
    assert not received
    return sent[CALLER]


@pytest.fixture
def check() -> Callable[[nn.Module, StagedModel, Arguments], Any]:
    """A function that fails unless the stages give the outputs, gradients and buffers of a copy of the model.

    It returns the stages' output.
    """
    return _check


def _check(model: nn.Module, staged: StagedModel, arguments: Arguments) -> Any:
    bare = copy.deepcopy(model)
    model.zero_grad()
    torch.manual_seed(1)
    expected, spec = tree_flatten(bare(*arguments.args, **arguments.kwargs))
    torch.manual_seed(1)
    output = _run_stages(staged, arguments)
    actual, actual_spec = tree_flatten(output)
    assert actual_spec == spec
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours == theirs if not isinstance(theirs, Tensor) else torch.allclose(ours, theirs, atol=1e-10, rtol=0)
    for leaves in (actual, expected):
        sum(leaf.sin().sum() for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad).backward()
    for (name, ours), theirs in zip(model.named_parameters(), bare.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or torch.allclose(ours.grad, theirs.grad, atol=1e-10, rtol=0), name
    for (name, ours), theirs in zip(model.named_buffers(), bare.buffers(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-10, rtol=0), name
    return output


@pytest.fixture
def gradients() -> Callable[[nn.Module, Callable[[Tensor], Tensor]], list[Tensor]]:
    """A function for the output of ``forward`` and the gradients of its input and of the model's parameters."""
    return _gradients


def _gradients(model: nn.Module, forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
    y = forward(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]
