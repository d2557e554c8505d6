"""The text of an entry whose steps wait at a named pipe until somebody opens its other end."""

from __future__ import annotations

__all__ = ["GATED_ENTRY"]

GATED_ENTRY = """\
import os
import torch
from torch import nn
from asyncpipe.train.workload import Workload

class Gate(nn.Module):
    def forward(self, x):
        os.write(1, b"in the gate\\n")  # Not `print`, which goes to the log of the job.
        with open("gate", "rb") as gate:
            gate.read()
        return x

def build(*, gated: bool = True) -> Workload:
    def batches(batch_size, generator):
        while True:
            yield torch.randn(batch_size, 2, generator=generator), torch.zeros(batch_size, 2)
    model = nn.Sequential(nn.Linear(2, 2), Gate() if gated else nn.Identity())
    return Workload(model, nn.functional.mse_loss, batches, memoryless=True)
"""
