"""The model of the U-Net benchmarks: that of ``benchmarks.models``, with the layers that the paper's authors used."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from asyncpipe.ops.device.devices import Device
from benchmarks.models.unet import unet

__all__ = ["loss_fn", "make_batch", "make_model", "parameter_count"]

loss_fn = nn.functional.binary_cross_entropy_with_logits


def make_model(depth: int, convs: int, channels: int) -> nn.Sequential:
    """The U-Net (``convs``, ``channels``), or (B, C) in the paper, of ``depth`` levels; pictures in three colours.

    It is made on torch's default device.
    """
    model = unet(depth, convs, channels, input_channels=3, output_channels=1)
    for position, layer in enumerate(model):
        if isinstance(layer, nn.Sequential):
            convolution = layer[0]
            assert isinstance(convolution, nn.Conv2d)
            norm = nn.InstanceNorm2d(convolution.out_channels)
            model[position] = nn.Sequential(convolution, nn.Dropout2d(0.1), norm, nn.LeakyReLU(0.01))
    return model


@cache
def parameter_count(depth: int, convs: int, channels: int) -> int:
    """The number of parameters of ``make_model``'s model."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make_model(depth, convs, channels).parameters())


def make_batch(samples: int, image: int, device: Device) -> tuple[Tensor, Tensor]:
    """Pictures of ``image`` × ``image`` pixels, and a mask for each."""
    pictures = torch.rand(samples, 3, image, image, device=device.physical)
    return pictures, torch.ones(samples, 1, image, image, device=device.physical)
