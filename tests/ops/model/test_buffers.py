"""Which copies of buffers a stage keeps for a recomputation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.ops.autograd.checkpoint import checkpoint
from asyncpipe.ops.model.buffers import BufferValues, StageBuffers


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Table(Counter):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.calls


@pytest.mark.promise("Memory", "Copies are kept only of buffers that a forward changes.")
def test_copies_are_kept_of_what_changes() -> None:
    module = nn.Sequential(Table(), Counter(), nn.BatchNorm1d(2), Table())
    buffers = StageBuffers(0, module, {})
    x = torch.randn(3, 2, requires_grad=True)
    for calls in range(3):
        kept: BufferValues = {}
        with torch.enable_grad():
            checkpoint(lambda tensors, kept=kept: run(buffers, module, kept, tensors), [x])
        assert sorted(name for _, name in kept) == ["calls", "num_batches_tracked", "running_mean", "running_var"]
        counts = {name: int(tensor) for (_, name), tensor in kept.items() if tensor is not None and not tensor.dim()}
        assert counts == {"calls": calls, "num_batches_tracked": calls}, "as they were before the forward"


def run(buffers: StageBuffers, module: nn.Module, kept: BufferValues, tensors: list[Tensor]) -> list[Tensor]:
    with buffers.during(kept):
        return [module(*tensors)]
