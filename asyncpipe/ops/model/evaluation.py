"""A model in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluating"]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, ``module`` is in evaluation mode; afterwards each of its modules is in the mode in which it was.

    Layers of bitsandbytes with 4 bits are in training mode, in which they compute the same. In evaluation mode they
    would pack their weights on some CPUs (AVX512-BF16), for good, and round more.
    """
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    for each, _ in modes:
        if any(kind.__name__ == "Linear4bit" for kind in type(each).__mro__):  # By name: it need not be installed.
            each.training = True
    try:
        yield
    finally:
        for each, mode in modes:
            each.training = mode
