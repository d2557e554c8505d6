"""A layer whose import makes the CPU a device with memory of its own, so that offload moves tensors.

Only in workers of a test that has set ``OWN_MEMORY`` in the environment, which they inherit.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from asyncpipe.ops.execute import offloading

OWN_MEMORY = "ASYNCPIPE_TESTS_OWN_MEMORY"

if OWN_MEMORY in os.environ:
    offloading.HOST_TYPES.discard("cpu")
    offloading.SMALLEST = 1


class Layer(nn.Module):
    """Counts in ``moved`` the saved tensors that came back somewhere else: 0 in the process of the tests."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.register_buffer("moved", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _Counting.apply(self.linear(x), self.moved)
        return made


class _Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, moved):
        made = x.tanh()
        ctx.save_for_backward(made)
        ctx.moved, ctx.address = moved, made.data_ptr()
        return made

    @staticmethod
    def backward(ctx, gradient):
        (made,) = ctx.saved_tensors
        if made.data_ptr() != ctx.address:
            ctx.moved.data += 1
        return gradient * (1 - made * made), None
