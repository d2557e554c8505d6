"""How a tensor lies in its memory, for another process that is to have it in the same way.

Kernels may add in another order where strides differ, so a tensor that travels keeps its own, gaps included.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Strides", "fills_its_memory", "strides_of"]


class Strides(NamedTuple):
    """Those of a tensor that is not contiguous."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def packed(self, tensor: Tensor) -> Tensor:
        """The elements of ``tensor``, whose strides these are, each once, and contiguous."""
        for dim, (length, stride) in enumerate(zip(self.shape, self.stride, strict=True)):
            if not stride and length > 1:
                tensor = tensor.narrow(dim, 0, 1)
        return tensor.contiguous()

    def laid_out(self, packed: Tensor) -> Tensor:
        """The tensor that ``packed`` was made of, in memory of its own."""
        with torch.no_grad():
            placed = torch.empty_strided(packed.shape, self.stride, dtype=packed.dtype, device=packed.device)
            return placed.copy_(packed).expand(self.shape)


def strides_of(tensor: Tensor) -> Strides | None:
    """The strides to keep; ``None`` if ``tensor`` is contiguous, or its elements overlap in a way that has no name."""
    if tensor.is_contiguous():
        return None
    shape, stride = tuple(tensor.shape), tensor.stride()
    reached = 0
    for step, length in sorted(zip(stride, shape, strict=True)):
        if length > 1 and step:
            if step <= reached:
                return None
            reached += step * (length - 1)
    return Strides(shape, stride)


def fills_its_memory(tensor: Tensor) -> bool:
    """Whether the elements lie side by side, in whatever order of the dimensions."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True
