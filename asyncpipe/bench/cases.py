"""The training steps that benchmarks measure: small, middle-sized and large stages, and blocks of a transformer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

__all__ = ["CASES", "RATE", "Case", "loss_fn", "mlp", "plain_step"]

loss_fn = nn.functional.mse_loss
RATE = 1024.0
"""Of an update from which gradients are read as differences of weights: large, so that no digits are lost."""


def mlp(width: int, layers: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """``layers`` times a linear layer of ``width`` with an activation behind it."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), activation()) for _ in range(layers)))


@dataclass(frozen=True, slots=True)
class Case:
    """A model, cut into stages of one device each, and its mini-batch; every call makes the same ones anew."""

    about: str
    stages: int
    microbatches: int
    shape: tuple[int, ...]
    """Of a micro-batch; the first number is its samples."""
    make_stage: Callable[[], nn.Sequential]

    def model(self) -> nn.Sequential:
        """The whole model; its children are the stages."""
        torch.manual_seed(0)
        return nn.Sequential(*(self.make_stage() for _ in range(self.stages)))

    def batch(self) -> tuple[Tensor, Tensor]:
        """The inputs and the targets of a mini-batch."""
        torch.manual_seed(1)
        shape = self.microbatches * self.shape[0], *self.shape[1:]
        return torch.randn(shape), torch.randn(shape)


def plain_step(stages: Sequence[nn.Module], x: Tensor, target: Tensor, microbatches: int) -> None:
    """The step without any library: one micro-batch after the other, in the calling thread."""
    for values, wanted in zip(x.chunk(microbatches), target.chunk(microbatches), strict=True):
        for stage in stages:
            values = stage(values)
        torch.autograd.backward(loss_fn(values, wanted) / microbatches)


def _blocks(width: int, count: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(count))
    )


def _wide(width: int, microbatches: int = 16) -> Case:
    about = f"2 stages of 4 × Linear({width})+ReLU, m={microbatches}, 64 rows each"
    return Case(about, 2, microbatches, (64, width), partial(mlp, width, 4))


_BLOCKS = "2 stages of 2 transformer blocks of width 256, m=8, 4 × 32 tokens each"
CASES = {
    "tiny": Case("4 stages of Linear(16)+ReLU, m=32, 4 rows each", 4, 32, (4, 16), partial(mlp, 16, 1)),
    "fine": _wide(256),
    "mid": _wide(512),
    "coarse": _wide(1024),
    "broad": _wide(1024, 4),
    "transformer": Case(_BLOCKS, 2, 8, (4, 32, 256), partial(_blocks, 256, 2)),
}
