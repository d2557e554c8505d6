"""The split backward: what each half computes, and when it frees memory."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from asyncpipe.ops.autograd.split_backward import SplitBackward

pytestmark = pytest.mark.usefixtures("seeded")


class Products(TorchDispatchMode):
    """Counts products of matrices and convolutions' gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm"):
            self.count[name] += 1
        if name == "convolution_backward":
            self.count.update(part for part, on in zip(("input", "weight", "bias"), args[-1], strict=True) if on)
        return function(*args, **kwargs or {})


def counted(call: Callable[[], Any]) -> Counter[str]:
    with Products() as products:
        call()
    return products.count


def test_neither_half_does_the_others_work() -> None:
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(4, 4), nn.Tanh())))
    x = torch.randn(3, 4, requires_grad=True)
    split = SplitBackward([model(x)], [torch.randn(3, 4)], [x])
    assert counted(split.input_gradients) == {"mm": 6}
    assert counted(split.weight_gradients) == {"mm": 6}


def test_a_custom_function_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """I computes all its gradients, so W must not run it again."""
    ran = []
    real = Shift.backward
    monkeypatch.setattr(Shift, "backward", staticmethod(lambda ctx, gradient: ran.append(1) or real(ctx, gradient)))
    shift, x = nn.Parameter(torch.randn(4)), torch.randn(3, 4, requires_grad=True)
    split = SplitBackward([Shift.apply(x, shift.sin())], [torch.ones(3, 4)], [x])
    split.input_gradients()
    assert shift.grad is None
    split.weight_gradients()
    assert ran == [1]
    assert torch.equal(shift.grad, 3 * shift.detach().cos())


# What is kept


class Kept:
    """A saved tensor that can be referred to weakly."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def watched() -> Iterator[list[weakref.ref[Any]]]:
    """References to what autograd saves meanwhile; the garbage collector is off, so only reference counts free them."""
    saved: list[weakref.ref[Any]] = []

    def pack(tensor: Tensor) -> Kept:
        kept = Kept(tensor.detach())  # A node's own output would hold the node.
        saved.append(weakref.ref(kept))
        return kept

    gc.collect()
    gc.disable()
    try:
        with saved_tensors_hooks(pack, lambda kept: kept.tensor):
            yield saved
    finally:
        gc.enable()


class Shift(torch.autograd.Function):
    """A custom function: it makes all its gradients at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x + shift

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.sum(0)


def prepared() -> tuple[SplitBackward, list[weakref.ref[Any]]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid())
    x = torch.randn(2, 4, requires_grad=True)
    y = model(x)
    z = Shift.apply(y, model[0].bias.exp())
    gradient = torch.randn(2, 4)
    alive = [weakref.ref(x), weakref.ref(y), weakref.ref(gradient)]
    return SplitBackward([z, y], [gradient, gradient], [x]), alive


@pytest.mark.parametrize("until", ["made", "I", "W"])
def test_nothing_is_kept(until: str) -> None:
    with watched() as saved:
        split, alive = prepared()
        if until != "made":
            split.input_gradients()
            assert any(reference() is not None for reference in saved)
        if until == "W":
            split.weight_gradients()
        else:
            del split
        assert len(saved) > 4
        assert not any(reference() is not None for reference in (*saved, *alive))


class _Fault(Exception):
    pass


@pytest.mark.parametrize("half", ["I", "W"])
def test_a_failure_leaves_nothing(half: str) -> None:
    def fail(*_: Any) -> None:
        raise _Fault

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with watched() as saved:
        x = torch.randn(2, 4, requires_grad=True)
        (x if half == "I" else model[2].weight).register_hook(fail)
        split = SplitBackward([model(x)], [torch.randn(2, 4)], [x])
        if half == "I":
            with pytest.raises(_Fault):
                split.input_gradients()
        else:
            split.input_gradients()
            with pytest.raises(_Fault):
                split.weight_gradients()
        assert not any(reference() is not None for reference in saved)
        del split


def test_input_gradients_share_no_memory_with_what_is_kept() -> None:
    """The stage that gets them may use them as a parameter's gradient, and add to that before W has run."""
    bias = nn.Parameter(torch.randn(4))
    x, y = torch.randn(2, 2, requires_grad=True), torch.randn(2, 2, requires_grad=True)
    split = SplitBackward([x.view(4) + y.view(4) + bias], [torch.ones(4)], [x, y])
    for gradient in split.input_gradients():
        gradient.mul_(100)
    split.weight_gradients()
    assert bias.grad.tolist() == [1] * 4
