"""A U-Net that finds the even digits in pictures made of digits: the workload of ``unet.toml``.

The model is the symmetric U-Net (B, C) of the torchgpipe paper (Kim et al. 2020, arXiv 2004.09910), after
Ronneberger et al. (2015): ``depth`` levels down and as many up, B convolutions in a row on each, C channels on
the first level and twice as many on each further one. It is one flat ``nn.Sequential``, so that it can be cut
anywhere. What the way down keeps for the way up is a skip, which asyncpipe hands from stage to stage::

    level 0   convolutions ── Keep ···························· Join ── convolutions ── 1x1
    level 1        pool ── convolutions ── Keep ····· Join ── convolutions ── upsample
    bottom                      pool ── convolutions ── upsample

The pictures are mosaics of scikit-learn's handwritten digits, which come with its package: nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Generator as Steps
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from asyncpipe import Namespace, Skippable, pop, skippable, stash
from asyncpipe.errors import OptionError
from asyncpipe.train.workload import Batch, Forward, Workload

DIGIT = 8
"""Pixels of a digit's side."""
PLACE = 10
"""Pixels of the side of a place for one digit, which leaves it some freedom."""
FILLED = 0.6
"""The share of places that hold a digit."""
INK = 0.25
"""From this brightness, of 1, a pixel belongs to its digit."""


def build(
    *,
    depth: int = 3,
    num_convs: int = 2,
    base_channels: int = 16,
    norm: bool = True,
    portals: bool = True,
    canvas: int = 32,
    noise: float = 0.2,
    marked: Sequence[int] = (0, 2, 4, 6, 8),
) -> Workload:
    """The workload: a U-Net that marks the pixels of the digits in ``marked`` among those of all digits.

    ``canvas`` is the side of the square pictures in pixels, ``noise`` the standard deviation of what is added to
    brightnesses of 0 to 1. The other parameters are those of ``unet``.
    """
    if canvas < PLACE or canvas % 2**depth:
        raise OptionError(f"canvas must be a multiple of 2**depth = {2**depth} and at least {PLACE}, got {canvas}")
    if not 0 < len(set(marked) & set(range(10))) == len(marked):
        raise OptionError(f"marked must be a list of different digits from 0 to 9, got {marked}")
    training, held_out = (Mosaics(*digits, canvas, noise, marked) for digits in split_digits())
    return Workload(
        model=unet(depth, num_convs, base_channels, input_channels=1, norm=norm, portals=portals),
        loss_fn=functional.binary_cross_entropy_with_logits,
        batches=training.batches,
        memoryless=True,
        tokens_per_sample=canvas**2,
        held_out=lambda batch_size: held_out.few(batch_size, count=8),
        sample=lambda forward: describe(forward, *held_out.few(64, count=1)[0]),
    )


# The model


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


# The pictures


def split_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and held-out digits: images (count, 8, 8) of 0 to 1, and their labels (count,).

    The last fifth is held out. Raises ``OptionError`` where scikit-learn is not installed.
    """
    try:
        load_digits = import_module("sklearn.datasets").load_digits
    except ModuleNotFoundError as error:
        raise OptionError("the digits need scikit-learn, which is not installed: pip install scikit-learn") from error
    digits = load_digits()
    images, labels = torch.from_numpy(digits.images).float() / 16, torch.from_numpy(digits.target).long()
    border = len(images) * 4 // 5
    return (images[:border], labels[:border]), (images[border:], labels[border:])


class Mosaics:
    """Pictures of several digits each, and masks of the pixels that belong to digits of the marked classes."""

    def __init__(self, images: Tensor, labels: Tensor, canvas: int, noise: float, marked: Sequence[int]) -> None:
        self._images = images
        self._marks = (images >= INK) & torch.isin(labels, torch.tensor(marked))[:, None, None]
        self._canvas = canvas
        self._noise = noise

    def batches(self, batch_size: int, generator: Generator) -> Iterator[Batch]:
        """Endless batches of pictures and masks, both (batch, 1, canvas, canvas)."""
        while True:
            yield self.draw(batch_size, generator)

    def few(self, batch_size: int, count: int) -> list[Batch]:
        """The same ``count`` batches each time."""
        generator = Generator().manual_seed(0)
        return [self.draw(batch_size, generator) for _ in range(count)]

    def draw(self, batch_size: int, generator: Generator) -> Batch:
        """One batch: a grid of places, in some of them a digit, somewhere in its place; then the noise."""
        side = self._canvas // PLACE
        places = (batch_size, side * side)
        which = torch.randint(len(self._images), places, generator=generator)
        filled = (torch.rand(places, generator=generator) < FILLED)[..., None, None]
        corners = torch.randint(PLACE - DIGIT + 1, (2, *places), generator=generator)
        corners += PLACE * torch.stack((torch.arange(side * side) // side, torch.arange(side * side) % side))[:, None]
        rows, columns = corners[..., None] + torch.arange(DIGIT)
        pixels = (rows[..., :, None] * self._canvas + columns[..., None, :]).flatten(1)
        # Places do not overlap, so no pixel is written twice.
        pictures, masks = torch.zeros(2, batch_size, self._canvas**2)
        pictures.scatter_(1, pixels, (self._images[which] * filled).flatten(1))
        masks.scatter_(1, pixels, (self._marks[which] & filled).float().flatten(1))
        pictures += self._noise * torch.randn(pictures.shape, generator=generator)
        shape = (batch_size, 1, self._canvas, self._canvas)
        return pictures.view(shape), masks.view(shape)


# What it has learned


async def describe(forward: Forward, pictures: Tensor, masks: Tensor) -> str:
    """How well the masks of ``pictures`` are met, and the first picture with its mask and the predicted one."""
    predicted = ((await forward(pictures)).cpu() > 0).float()
    score = intersection_over_union(predicted, masks)
    titles = ("picture", "wanted", "predicted")
    shown = [sketch(image[0, 0]) for image in (pictures, masks, predicted)]
    width = len(shown[0][0])
    lines = ["  ".join(title.ljust(width) for title in titles), *("  ".join(row) for row in zip(*shown, strict=True))]
    drawn = "\n".join(line.rstrip() for line in lines)
    return f"IoU {score:.3f} over {len(pictures)} pictures of digits it has not seen\n{drawn}"


def intersection_over_union(predicted: Tensor, wanted: Tensor) -> float:
    """Pixels in both masks over pixels in either, over the whole batch; 1 where both are empty."""
    both, either = (predicted * wanted).sum().item(), predicted.maximum(wanted).sum().item()
    return both / either if either else 1.0


def sketch(image: Tensor) -> list[str]:
    """``image`` (height, width), of 0 to 1, in ASCII: a line for two rows, for letters are twice as high as wide."""
    shades = " .:-=+*#%@"
    rows = functional.avg_pool2d(image[None], (2, 1))[0].clamp(0, 1)
    return ["".join(shades[round(value * (len(shades) - 1))] for value in row) for row in rows.tolist()]
