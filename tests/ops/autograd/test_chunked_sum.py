"""A sum by chunks has the gradients of the whole sum, times what comes from behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.ops.autograd.chunked_sum import chunked_sum


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("frozen", ["", "rows", "weight"])
def test_gradients_are_those_of_the_whole_sum_times_what_comes_from_behind(chunk: int, frozen: str) -> None:
    torch.manual_seed(0)
    head = nn.Linear(4, 5).double()
    rows, labels = torch.randn(7, 4, dtype=torch.float64), torch.randint(5, (7,))
    rows.requires_grad_(frozen != "rows")
    head.weight.requires_grad_(frozen != "weight")
    ends = [each for each in (rows, *head.parameters()) if each.requires_grad]

    def loss(some: Tensor, theirs: Tensor) -> Tensor:
        return nn.functional.cross_entropy(head(some), theirs, reduction="sum")

    expected = torch.autograd.grad(3 * loss(rows, labels), ends)
    total = chunked_sum(loss, rows, labels, list(head.parameters()), chunk=chunk)
    for found, wanted in zip(torch.autograd.grad(3 * total, ends), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
