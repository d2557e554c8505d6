"""How a tensor lies in its memory, for another process that is to have it in the same way.

Kernels may add in another order where strides differ, or where a tensor begins at another place between two multiples
of the processor's vectors. So a tensor that travels keeps its strides, gaps included, and its alignment.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "MemoryLayout", "fills_its_memory", "layout_in_memory", "overlaps"]

ALIGNMENT = 64
"""Bytes. torch's allocator begins tensors at multiples of it, and no vector of a processor is larger."""


class MemoryLayout(NamedTuple):
    """That of a tensor which is not contiguous, or does not begin where torch's allocator begins tensors."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int
    """How many elements behind a multiple of ``ALIGNMENT`` it begins."""
    overlaps: bool
    """Whether elements share memory in another way than by a stride of 0."""

    def packed(self, tensor: Tensor) -> Tensor:
        """The elements of ``tensor``, whose layout this is, each once, and contiguous."""
        if self.overlaps:
            return tensor.detach().as_strided((_span(self.shape, self.stride),), (1,))
        for dim, (length, stride) in enumerate(zip(self.shape, self.stride, strict=True)):
            if not stride and length > 1:
                tensor = tensor.narrow(dim, 0, 1)
        return tensor.contiguous()

    def laid_out(self, packed: Tensor) -> Tensor:
        """The tensor that ``packed`` was made of, in memory of its own. No view, for autograd."""
        stride = (1,) if self.overlaps else self.stride
        room = ALIGNMENT // packed.itemsize
        memory = torch.empty(_span(packed.shape, stride) + 2 * room, dtype=packed.dtype, device=packed.device)
        begin = -memory.data_ptr() % ALIGNMENT // packed.itemsize + self.begin
        storage = memory.untyped_storage()
        with torch.no_grad():
            memory.set_(storage, begin, packed.shape, stride).copy_(packed)
            return memory.set_(storage, begin, self.shape, self.stride)


def layout_in_memory(tensor: Tensor) -> MemoryLayout | None:
    """The layout to keep; ``None`` where there is nothing to tell, or much memory without elements."""
    begin = tensor.data_ptr() % ALIGNMENT
    if not begin and tensor.is_contiguous():
        return None
    begin = 0 if begin % tensor.itemsize else begin // tensor.itemsize
    shape, stride = tuple(tensor.shape), tensor.stride()
    is_shared = overlaps(shape, stride)
    if is_shared and _span(shape, stride) > tensor.numel():
        return None
    return MemoryLayout(shape, stride, begin, is_shared)


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


def overlaps(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements share memory in another way than by a stride of 0."""
    reached = 0
    for step, length in sorted(zip(stride, shape, strict=True)):
        if length > 1 and step:
            if step <= reached:
                return True
            reached += step * (length - 1)
    return False


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many elements there would be between the first and the last one, both included, without gaps."""
    if 0 in shape:
        return 0
    return 1 + sum([(length - 1) * step for length, step in zip(shape, stride, strict=True)])
