"""Checkpoint and Recompute: bit-equal gradients, exactly one recomputation, and no activation kept until then."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.errors import RecomputeError
from asyncpipe.ops.autograd.checkpoint import checkpoint

DTYPES = [torch.float32, torch.float64]
Function = Callable[[Sequence[Tensor]], list[Tensor]]


class Counted:
    """A function of tensors that counts its calls."""

    def __init__(self, function: Function) -> None:
        self.calls = 0
        self.graphs: list[bool] = []
        self._function = function

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.calls += 1
        self.graphs.append(torch.is_grad_enabled())
        return self._function(tensors)


def model_and_input(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.GELU()).to(dtype)
    return model, torch.randn(4, 5, dtype=dtype, requires_grad=True)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    found = [parameter.grad for parameter in model.parameters()] + [x.grad]
    assert all(grad is not None for grad in found)
    return [grad.clone() for grad in found if grad is not None]


def plain_gradients(dtype: torch.dtype) -> list[Tensor]:
    model, x = model_and_input(dtype)
    model(x).square().sum().backward()
    return gradients(model, x)


def assert_bit_equal(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.promise(
    "Bit-identical results",
    "A recomputation sees the input, buffers, draws and autocast of its forward: gradients are bit-identical.",
)
@pytest.mark.parametrize("early", [False, True], ids=["in the backward", "early"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("no_leaks")
def test_gradients_are_bit_equal_and_the_function_runs_twice(dtype: torch.dtype, early: bool) -> None:
    model, x = model_and_input(dtype)
    function = Counted(lambda tensors: [model(tensors[0])])
    (y,), handle = checkpoint(function, [x])
    assert (function.calls, function.graphs) == (1, [False])
    assert y.requires_grad
    if early:
        handle.run()
        handle.run()
        assert function.calls == 2
    y.square().sum().backward()
    assert (function.calls, function.graphs) == (2, [False, True])
    assert_bit_equal(gradients(model, x), plain_gradients(dtype))


def node_called(name: str, tensor: Tensor) -> Any:
    """The node of the backward graph of ``tensor`` whose name holds ``name``."""
    nodes = [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            if name in node.name():
                return node
            nodes += [following for following, _ in node.next_functions]
    raise AssertionError(f"no {name} in the backward graph")


@pytest.mark.parametrize("early", [False, True])
def test_recompute_precedes_checkpoint_in_the_backward(early: bool) -> None:
    log: list[str] = []
    x = torch.ones(2, requires_grad=True)

    def function(tensors: Sequence[Tensor]) -> list[Tensor]:
        log.append("run")
        result = tensors[0] * 2
        if result.requires_grad:
            result.register_hook(lambda grad: log.append("backward of the run"))
        return [result]

    (y,), handle = checkpoint(function, [x])
    y.register_hook(lambda grad: log.append("gradient"))
    node_called("_Checkpoint", y).register_prehook(lambda grads: log.append("Checkpoint"))
    if early:
        handle.run()
    y.sum().backward()
    middle = ["run", "gradient"] if early else ["gradient", "run"]
    assert log == ["run", *middle, "Checkpoint", "backward of the run"]


@pytest.mark.parametrize("early", [False, True])
def test_a_second_backward_is_refused(early: bool) -> None:
    """A second backward raises; it does not silently add the gradients again."""
    x = torch.ones(2, requires_grad=True)
    (y,), handle = checkpoint(lambda tensors: [tensors[0].exp()], [x])
    loss = y.sum()
    if early:
        handle.run()
    loss.backward(retain_graph=True)
    before = x.grad.clone()
    with pytest.raises(RecomputeError, match="this backward has run already; its activations are gone"):
        loss.backward()
    assert torch.equal(x.grad, before)
    with pytest.raises(RecomputeError, match="this backward has run already"):
        handle.run()


def test_several_inputs_and_outputs_of_every_kind() -> None:
    """Inputs without gradient, integer ones, integer outputs, detached outputs, outputs that are inputs."""
    weight = torch.full((3,), 2.0, requires_grad=True)

    def function(tensors: Sequence[Tensor]) -> list[Tensor]:
        x, constant, index = tensors
        y = x * weight + constant
        return [index + 1, y, y.detach() * 3, x, (y * y)[index], constant]

    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    constant, index = torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0, 2])
    outputs, _ = checkpoint(function, [x, constant, index])
    assert [output.dtype for output in outputs] == [torch.int64, *[torch.float32] * 5]
    assert not outputs[0].requires_grad
    assert not outputs[5].requires_grad, "passed on as it is, so it needs none behind the function either"
    (outputs[1].sum() + outputs[3].sum() + outputs[4].sum()).backward()
    found = x.grad.clone(), weight.grad.clone()
    assert constant.grad is None
    x.grad = weight.grad = None
    plain = function([x, constant, index])
    (plain[1].sum() + plain[3].sum() + plain[4].sum()).backward()
    assert_bit_equal(list(found), [x.grad, weight.grad])


def test_an_input_overwritten_in_place_is_refused() -> None:
    with pytest.raises(RecomputeError, match="overwritten in place"):
        checkpoint(lambda tensors: [tensors[0].mul_(2)], [torch.ones(2)])


@pytest.mark.promise("Refused, not wrong", "An input that is overwritten before its recomputation is refused.")
def test_an_input_overwritten_before_the_recomputation_is_refused() -> None:
    """The saved input is the caller's tensor: recomputing from another value would give a wrong gradient."""
    x = torch.ones(2)
    weight = torch.ones(2, requires_grad=True)
    (y,), _ = checkpoint(lambda tensors: [tensors[0] * weight], [x])
    x.mul_(5)
    with pytest.raises(RecomputeError):
        y.sum().backward()


@pytest.mark.promise("Memory", "Until its recomputation, a forward keeps its input and no activation.")
@pytest.mark.usefixtures("no_leaks")
def test_activations_are_gone_after_the_forward_and_after_the_backward() -> None:
    activations: list[weakref.ref[Tensor]] = []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.Sigmoid())
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: activations.append(weakref.ref(output)))
    x = torch.randn(2, 4, requires_grad=True)
    (y,), handle = checkpoint(lambda tensors: [model(tensors[0])], [x])
    assert len(activations) == 4
    assert [ref() for ref in activations] == [None] * 4
    handle.run()
    assert sum(ref() is not None for ref in activations[4:]) > 0, "the second run keeps its graph"
    y.sum().backward()
    assert [ref() for ref in activations[4:]] == [None] * 4
