"""Which outputs of a recomputation are other values than those of the forward, and which differ by rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncpipe.errors import RecomputeError
from asyncpipe.ops.model.output_watch import OutputWatch


def compare(first: Tensor | list[Tensor], again: Tensor | list[Tensor]) -> None:
    one, other = ([given] if isinstance(given, Tensor) else given for given in (first, again))
    watch = OutputWatch(3)
    watch.compare(watch.sample(0, one), other)


def traced(values: Tensor) -> Tensor:
    return values.detach().clone().requires_grad_()


EQUAL = {
    "half": (torch.ones(9, dtype=torch.bfloat16), torch.ones(9, dtype=torch.bfloat16) * 1.01),
    "another order of a sum": (torch.full((50, 50), 0.3), torch.full((50, 50), 0.3) * (1 + 1e-6)),
    "terms that cancel": (torch.tensor(1e-8), torch.tensor(-2e-8)),
    "complex": (torch.full((3,), 1 + 2j), torch.full((3,), 1 + 2j)),
    "what is not finite": (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, torch.nan])),
    "nothing": (torch.empty(0, 3), torch.empty(0, 3)),
    "strides": (torch.arange(12.0).view(3, 4).T.contiguous(), torch.arange(12.0).view(3, 4).T),
    "a large one": (torch.ones(64, 1024), torch.ones(64, 1024)),
}


@pytest.mark.promise("Refused, not wrong", "A recomputation that differs only by rounding is accepted.")
@pytest.mark.parametrize(("first", "again"), EQUAL.values(), ids=EQUAL)
def test_the_same_but_for_rounding(first, again):
    compare(traced(first), traced(again))


OTHER = {
    "an 8-bit type": (torch.ones(4, 5).to(torch.float8_e4m3fn), 2.0),
    "scaled": (torch.randn(4, 5), 1.1),
    "one column of many": (torch.ones(64, 1024), torch.arange(1024.0) == 7),
    "complex": (torch.full((3,), 1 + 2j), 1j),
    "a loss": (torch.tensor(0.7), 0.9),
    "another dtype": (torch.ones(3, dtype=torch.float64), torch.full((3,), 2, dtype=torch.bfloat16)),
}


@pytest.mark.promise("Refused, not wrong", "A recomputation whose results differ from those of its forward is refused.")
@pytest.mark.parametrize(("first", "factor"), OTHER.values(), ids=OTHER)
def test_other_values(first, factor):
    again = (first.float() * factor).to(first.dtype) if first.itemsize == 1 else first * factor
    with pytest.raises(RecomputeError, match="stage 3 computed other values when it was recomputed"):
        compare(traced(first), traced(again))
