"""A model in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluating"]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, ``module`` is in evaluation mode; afterwards each of its modules is in the mode in which it was.

    Layers of bitsandbytes are in training mode, which changes nothing of what they compute: in evaluation mode, those
    of 4 bits pack their weights on some CPUs (AVX512-BF16), which stay packed and round more.
    """
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    for each, _ in modes:
        if type(each).__module__.startswith("bitsandbytes."):
            each.training = True
    try:
        yield
    finally:
        for each, mode in modes:
            each.training = mode
