"""What an entry of the zoo is, and how its model is made fit to be compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["SAMPLES", "ZOO", "Architecture", "entry", "floats", "numbers"]

SAMPLES = 9
"""Of a mini-batch: with 4 micro-batches, of 3, 2, 2 and 2."""

Build = Callable[[], tuple[nn.Module, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A small model of a real architecture, and what it is called with."""

    name: str
    library: str
    build: Build
    """The model, as its library makes it, and the keyword arguments of a call."""

    mixes: bool = False
    """Whether its output of a sample depends on the others, besides by batch norms."""

    def made(self) -> tuple[nn.Module, dict[str, Any]]:
        """The model in float64 and in training mode, without draws, and its batch; the same every time."""
        torch.manual_seed(1)
        model, batch = self.build()
        _draw_nothing(model)
        _break_zeros(model)
        return model.double().train(), batch


ZOO: dict[str, Architecture] = {}
"""By name."""


def entry(library: str, *, mixes: bool = False, name: str = "") -> Callable[[Build], Build]:
    """Decorates a function that builds an architecture, which goes into the zoo under its name."""

    def register(build: Build) -> Build:
        called = name or build.__name__
        ZOO[called] = Architecture(called, library, build, mixes)
        return build

    return register


def numbers(limit: int, *shape: int) -> Tensor:
    """Random integers from 1 to ``limit - 1``, for each sample."""
    return torch.randint(1, limit, (SAMPLES, *shape))


def floats(*shape: int) -> Tensor:
    """Random numbers, for each sample."""
    return torch.randn(SAMPLES, *shape, dtype=torch.float64)


_CHANCES = "p drop_prob dropout attention_dropout activation_dropout dropout_p layerdrop dropout_prob".split()


def _draw_nothing(model: nn.Module) -> None:
    """Set every chance of dropping something to 0: the draws of a pipeline are not those of the unsplit model."""
    for module in model.modules():
        for name in _CHANCES:
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)


def _break_zeros(model: nn.Module) -> None:
    """Fill matrices that begin with zeros, behind which every gradient would be zero, or that of a norm huge."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.1)
