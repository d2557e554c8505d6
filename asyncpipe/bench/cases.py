"""The training steps that benchmarks measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Case", "loss_fn", "mlp", "plain_step"]

loss_fn = nn.functional.mse_loss


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
