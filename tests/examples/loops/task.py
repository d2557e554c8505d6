"""The model and the data of these loops."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def layers() -> list[nn.Module]:
    """A classifier, as a list of layers; each call gives the same weights."""
    torch.manual_seed(0)
    return [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)]


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Mini-batches of 16 samples; each call gives the same four."""
    random = torch.Generator().manual_seed(1)
    for _ in range(4):
        yield torch.randn(16, 16, generator=random), torch.randint(4, (16,), generator=random)
