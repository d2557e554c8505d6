"""``partition_model``: torch's former helper that places the layers of a model on devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from asyncpipe.compat.module import check_sequential
from asyncpipe.errors import DeviceError
from asyncpipe.ops.model.sequential import split

__all__ = ["partition_model"]


def partition_model(
    module: nn.Sequential, balance: Sequence[int], devices: Sequence[int | str | torch.device] | None = None
) -> nn.Sequential:
    """A sequence of ``len(balance)`` sequences with that many layers of ``module``, each moved to its device.

    ``devices``: one for each, by default the CUDA devices 0, 1, …. Raises ``TypeError`` for another type of module,
    ``ValueError`` for a wrong balance and for too few devices.
    """
    parts = split(check_sequential(module), balance, len(balance))
    places = range(len(parts)) if devices is None else devices
    if len(places) < len(parts):
        raise DeviceError(f"{len(parts)} parts need {len(parts)} devices, got {list(places)}")
    return nn.Sequential(*(part.to(place) for part, place in zip(parts, places, strict=False)))
