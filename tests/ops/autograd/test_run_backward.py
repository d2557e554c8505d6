"""The backward without torch's Python: the same gradients; a class of tensors with its own backward keeps it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncpipe.ops.autograd.run_backward import run_backward


def test_gradients_are_those_of_torch() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    starts = torch.randn(4, 3), torch.randn(4)
    torch.autograd.backward((x.sin(), x.prod(1)), starts)
    wanted, x.grad = x.grad, None
    made = [x.sin(), x.prod(1)]
    run_backward(made, starts, retain=True)
    run_backward(made, starts, retain=False)
    assert wanted is not None
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * wanted)
    with pytest.raises(RuntimeError, match="a second time"):
        run_backward(made, starts, retain=False)


class _Told(Tensor):
    told: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.told.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_class_of_tensors_has_its_own_backward() -> None:
    x = torch.ones(4, requires_grad=True)
    made = x.as_subclass(_Told) * 2
    _Told.told.clear()
    run_backward([made], [torch.ones(4)], retain=False)
    assert "backward" in _Told.told
    assert torch.equal(x.grad, torch.full((4,), 2.0))
