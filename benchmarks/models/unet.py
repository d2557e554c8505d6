"""The U-Net of the torchgpipe paper, with and without skips, for benchmarks and tests.

It is the symmetric U-Net (B, C) of Kim et al. (2020, arXiv 2004.09910), after Ronneberger et al. (2015): ``depth``
levels down and as many up, B convolutions in a row on each, C channels on the first level and twice as many on each
further one. It is one flat ``nn.Sequential``, so that it can be cut anywhere. What the way down keeps for the way up is
a skip, which asyncpipe hands from stage to stage::

    level 0   convolutions ── Keep ···························· Join ── convolutions ── 1x1
    level 1        pool ── convolutions ── Keep ····· Join ── convolutions ── upsample
    bottom                      pool ── convolutions ── upsample
"""

from __future__ import annotations

from collections.abc import Generator as Steps
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe import Namespace, Skippable, pop, skippable, stash
from asyncpipe.errors import OptionError

__all__ = ["unet"]


def unet(
    depth: int = 5,
    num_convs: int = 5,
    base_channels: int = 64,
    input_channels: int = 3,
    output_channels: int = 1,
    norm: bool = True,
    portals: bool = True,
) -> nn.Sequential:
    """A U-Net, (batch, input channels, height, width) to (batch, output channels, height, width) of logits.

    Height and width are multiples of ``2**depth``. Without ``portals``, the tensors that are kept for the way up
    travel in a tuple through every layer in between, as they have to where there are no skips; parameters, their
    names, and arithmetic are the same. Raises ``OptionError`` for a size that is not there.
    """
    for name, value in (("depth", depth), ("num_convs", num_convs), ("base_channels", base_channels)):
        if value < 1:
            raise OptionError(f"{name} must be at least 1, got {value}")
    if base_channels % 2:
        raise OptionError(f"base_channels must be even, for the last level halves them, got {base_channels}")
    namespaces = [Namespace() for _ in range(depth)]
    layers: list[nn.Module] = []
    channels = input_channels
    for level in range(depth):
        wide = base_channels * 2**level
        layers += [*convolutions(channels, wide, wide, num_convs, norm)]
        layers += [Keep().isolate(namespaces[level]), nn.MaxPool2d(2)]
        channels = wide
    layers += [*convolutions(channels, 2 * channels, channels, num_convs, norm)]
    for level in reversed(range(depth)):
        half = base_channels * 2**level // 2
        layers += [nn.Upsample(scale_factor=2), Join().isolate(namespaces[level])]
        layers += [*convolutions(4 * half, half, half, num_convs, norm)]
    layers.append(nn.Conv2d(base_channels // 2, output_channels, kernel_size=1))
    return nn.Sequential(*(layers if portals else without_portals(layers)))


def convolutions(channels: int, inner: int, last: int, count: int, norm: bool) -> Iterator[nn.Sequential]:
    """``count`` layers in a row, from ``channels`` over ``inner`` to ``last`` ones."""
    widths = [channels, *[inner] * (count - 1), last]
    for before, after in pairwise(widths):
        # A normalization would take a bias out again.
        convolution = nn.Conv2d(before, after, kernel_size=3, padding=1, bias=not norm)
        yield nn.Sequential(convolution, *([nn.BatchNorm2d(after)] if norm else []), nn.ReLU())


@skippable(stash=["skip"])
class Keep(nn.Module, Skippable):
    """Passes its input on, and keeps it for the ``Join`` of the same namespace."""

    def forward(self, x: Tensor) -> Steps[Any, Any, Tensor]:
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Join(nn.Module, Skippable):
    """Appends the channels that were kept to those of its input."""

    def forward(self, x: Tensor) -> Steps[Any, Any, Tensor]:
        skip = yield pop("skip")
        return torch.cat((x, skip), dim=1)


# The model without portals


def without_portals(layers: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Layers that pass (x, the tensor kept last, …, the one kept first) on, wherever any is kept."""
    kept = 0
    for layer in layers:
        if isinstance(layer, Keep):
            yield KeepBeside()
            kept += 1
        elif isinstance(layer, Join):
            yield JoinBeside()
            kept -= 1
        elif kept:
            yield Beside(*layer) if isinstance(layer, nn.Sequential) else Beside(layer)
        else:
            yield layer


class Beside(nn.Sequential):
    """Its layers, for the first of a tuple's tensors; the others pass by."""

    def forward(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *kept = values
        for layer in self:
            x = layer(x)
        return x, *kept


class KeepBeside(nn.Module):
    """Keeps the first tensor as the second."""

    def forward(self, values: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *kept = (values,) if isinstance(values, Tensor) else values
        return x, x, *kept


class JoinBeside(nn.Module):
    """Appends the second tensor's channels to the first's; where none is left, a tensor leaves the tuple."""

    def forward(self, values: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        x, skip, *kept = values
        joined = torch.cat((x, skip), dim=1)
        return (joined, *kept) if kept else joined
