"""AmoebaNet-D, which the GPipe and torchgpipe papers scale up, for benchmarks and tests.

The architecture was found by evolution (Real et al. 2018, arXiv 1802.01548); the papers (arXiv 1811.06965 and
2004.09910) write it AmoebaNet-D (L, D): L normal cells, D filters. A cell reads the outputs of the two cells before it,
so what travels from layer to layer is a pair::

    Stem ─▶ [reductions] ─▶ L/3 normal ─▶ reduction ─▶ L/3 normal ─▶ reduction ─▶ L/3 normal ─▶ Classifier

    (newest, previous) ──▶ cell ──▶ (its output, newest)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncpipe.errors import OptionError

__all__ = ["amoebanetd"]

Pair = tuple[Tensor, Tensor]
"""The newest output of a cell, and the one before it."""


def amoebanetd(
    num_classes: int = 10,
    num_layers: int = 6,
    num_filters: int = 32,
    input_channels: int = 3,
    stem_reductions: int = 2,
) -> nn.Sequential:
    """An AmoebaNet-D, (batch, input channels, height, width) to (batch, classes) of logits.

    ``num_layers`` counts normal cells. The stem halves height and width once and in each of its reduction
    cells, of which there are two for ImageNet, and fewer where images are small. Raises ``OptionError`` for
    numbers that cannot be divided as the architecture wants.
    """
    if num_layers < 3 or num_layers % 3:
        raise OptionError(f"num_layers must be a positive multiple of 3, got {num_layers}")
    if stem_reductions < 0:
        raise OptionError(f"stem_reductions must be at least 0, got {stem_reductions}")
    # A bottleneck has a quarter of its cell's channels, and reductions of the stem halve what the next one has.
    unit = 4 * 2 ** max(stem_reductions - 1, 0)
    if num_filters < unit or num_filters % unit:
        raise OptionError(f"num_filters must be a positive multiple of {unit}, got {num_filters}")
    repeat = [NORMAL] * (num_layers // 3)
    kinds = [REDUCTION] * stem_reductions + [*repeat, REDUCTION, *repeat, REDUCTION, *repeat]
    channels = num_filters // 2**stem_reductions
    layers: list[nn.Module] = [Stem(input_channels, channels)]
    newest = previous = channels
    after_reduction = False
    for kind in kinds:
        if kind.reduces:
            channels *= 2
        layers.append(Cell(kind, newest, previous, channels, after_reduction))
        newest, previous, after_reduction = channels * len(kind.joined), newest, kind.reduces
    return nn.Sequential(*layers, Classifier(newest, num_classes))


class Stem(nn.Module):
    """Images to the first pair, at half the height and width."""

    def __init__(self, input_channels: int, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(input_channels, channels, kernel_size=3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, images: Tensor) -> Pair:
        x = self.norm(self.convolution(images))
        return x, x


class Cell(nn.Module):
    """A pair to the next one: five sums of two operations each, some of the states joined by channels.

    ``channels`` is that of every state inside; the pair that comes in has ``newest`` and ``previous`` ones.
    """

    def __init__(self, kind: CellKind, newest: int, previous: int, channels: int, after_reduction: bool) -> None:
        super().__init__()
        self.kind = kind
        self.fit_newest = convolve(newest, channels, (1, 1))
        self.fit_previous: nn.Module = nn.Identity()
        if after_reduction:
            self.fit_previous = Halve(previous, channels)
        elif previous != channels:
            self.fit_previous = convolve(previous, channels, (1, 1))
        self.operations = nn.ModuleList()
        for state, make in (operand for operands in kind.sums for operand in operands):
            # The pair has the size before the reduction, states made of it the size after.
            self.operations.append(make(channels, 2 if kind.reduces and state < 2 else 1))

    def forward(self, pair: Pair) -> Pair:
        newest, previous = pair
        states = [self.fit_newest(newest), self.fit_previous(previous)]
        operations = iter(self.operations)
        for (first, _), (second, _) in self.kind.sums:
            states.append(next(operations)(states[first]) + next(operations)(states[second]))
        return torch.cat([states[state] for state in self.kind.joined], dim=1), newest


class Classifier(nn.Module):
    """The newest of a pair to (batch, classes) of logits."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.logits = nn.Linear(channels, num_classes)

    def forward(self, pair: Pair) -> Tensor:
        newest, _ = pair
        logits: Tensor = self.logits(newest.mean(dim=(2, 3)))
        return logits


# Operations: (channels, stride) to a module that keeps the channels


def conv_1x1(channels: int, stride: int) -> nn.Sequential:
    """One convolution."""
    return convolve(channels, channels, (1, 1), stride=stride)


def conv_3x3(channels: int, stride: int) -> nn.Sequential:
    """A bottleneck around a convolution of 3 by 3."""
    return convolve(channels, channels, (1, 1), (3, 3), (1, 1), stride=stride)


def conv_1x7_7x1(channels: int, stride: int) -> nn.Sequential:
    """A bottleneck around one of 7 by 7 that is factorized."""
    return convolve(channels, channels, (1, 1), (1, 7), (7, 1), (1, 1), stride=stride)


def max_pool_2x2(channels: int, stride: int) -> nn.Module:
    """The largest of 2 by 2; only reductions have it, so ``stride`` is 2."""
    return nn.MaxPool2d(2, stride, ceil_mode=True)


def max_pool_3x3(channels: int, stride: int) -> nn.Module:
    """The largest of 3 by 3."""
    return nn.MaxPool2d(3, stride, padding=1)


def avg_pool_3x3(channels: int, stride: int) -> nn.Module:
    """The mean of 3 by 3, or of as many as there are at the border."""
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def none(channels: int, stride: int) -> nn.Module:
    """Nothing, or what comes closest to it at half the size."""
    return nn.Identity() if stride == 1 else Halve(channels, channels)


def convolve(before: int, after: int, *kernels: tuple[int, int], stride: int = 1) -> nn.Sequential:
    """ReLU, convolution and batch norm for each kernel, with a quarter of ``after`` channels between two of them.

    In a row of several, those of more than one pixel stride, each in the directions that it covers.
    """
    layers: list[nn.Module] = []
    for position, (height, width) in enumerate(kernels, 1):
        channels = after if position == len(kernels) else after // 4
        alone = len(kernels) == 1
        strides = (stride if alone or height > 1 else 1, stride if alone or width > 1 else 1)
        padding = (height // 2, width // 2)
        convolution = nn.Conv2d(before, channels, (height, width), strides, padding, bias=False)
        layers += [nn.ReLU(), convolution, nn.BatchNorm2d(channels)]
        before = channels
    return nn.Sequential(*layers)


class Halve(nn.Module):
    """Half the height and width, rounded up: of 2 by 2 pixels, one makes half of the channels, another the rest."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(before, after // 2, kernel_size=1, stride=2, bias=False)
        self.odd = nn.Conv2d(before, after - after // 2, kernel_size=1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(x)
        moved = functional.pad(x, (0, 1, 0, 1))[..., 1:, 1:]
        halved: Tensor = self.norm(torch.cat((self.even(x), self.odd(moved)), dim=1))
        return halved


# What evolution found


Operand = tuple[int, Callable[[int, int], nn.Module]]
"""Which state, and what is done to it. States 0 and 1 are the pair, newest first; each sum makes one more."""


@dataclass(frozen=True, slots=True)
class CellKind:
    """The wiring of a kind of cell."""

    reduces: bool
    sums: tuple[tuple[Operand, Operand], ...]
    joined: tuple[int, ...]
    """The states that make the output, their channels in a row."""


NORMAL = CellKind(
    reduces=False,
    sums=(
        ((1, conv_1x1), (1, max_pool_3x3)),
        ((1, none), (0, conv_1x7_7x1)),
        ((0, conv_1x1), (0, conv_1x7_7x1)),
        ((2, max_pool_3x3), (2, none)),
        ((1, avg_pool_3x3), (5, conv_1x1)),
    ),
    # With these, the parameters are as many as the GPipe and torchgpipe papers count.
    joined=(0, 3, 4, 6),
)

REDUCTION = CellKind(
    reduces=True,
    sums=(
        ((0, max_pool_2x2), (0, max_pool_3x3)),
        ((2, none), (1, conv_3x3)),
        ((2, conv_1x7_7x1), (2, max_pool_3x3)),
        ((3, none), (1, max_pool_2x2)),
        ((2, avg_pool_3x3), (3, conv_1x1)),
    ),
    joined=(4, 5, 6),
)
