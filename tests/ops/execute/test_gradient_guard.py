"""Gradients of accumulated steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.ops import torch_internals
from asyncpipe.ops.execute import gradient_guard
from asyncpipe.ops.execute.gradient_guard import GradientGuard


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def test_gradients_are_added_to_those_of_earlier_steps_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the earlier tensors, by one call for all that are of one type."""
    calls = []
    real = torch_internals.add_to_each
    monkeypatch.setattr(gradient_guard, "add_to_each", lambda *each: (calls.append(len(each[0])), real(*each)))
    dense = [random(3, 5, dtype=dtype) for dtype in [torch.float32] * 3 + [torch.bfloat16] * 2 + [torch.complex64]]
    strided = random(5, 3, dtype=torch.float32).t()
    sparse = random(3, 5, dtype=torch.float32).to_sparse()
    earlier: list[Tensor | None] = [*dense, strided, sparse, sparse.clone(), None, dense[0] * 3]
    new: list[Tensor | None] = [each * 1.7 for each in [*dense, dense[0], sparse, dense[0]]] + [dense[0] * 2, None]
    wanted = [
        a if b is None else b if a is None else a.to_dense() + b.to_dense() for a, b in zip(earlier, new, strict=True)
    ]
    parameters = [nn.Parameter(torch.zeros(3, 5, dtype=w.dtype)) for w in wanted if w is not None]
    for parameter, gradient in zip(parameters, earlier, strict=True):
        parameter.grad = gradient
    guard = GradientGuard()
    guard.begin(parameters)
    for parameter, gradient in zip(parameters, new, strict=True):
        parameter.grad = gradient
    with torch.no_grad():
        guard.commit()
    for parameter, total in zip(parameters, wanted, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad.to_dense(), total)
    assert all(p.grad is e for p, e in zip(parameters[:7], earlier[:7], strict=True)), "an optimizer may have it"
    assert sorted(calls) == [1, 2, 4]
