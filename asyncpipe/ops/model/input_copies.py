"""Copies of what a stage receives, for stages that overwrite it in place: others still read the original.

A recomputation reads it, and autograd refuses a write into a tensor that needs a gradient. A module may say that it
works in place (``StageModule.overwrites_input``). A function such as ``x.mul_(2)`` says nothing, so it is seen, by
torch's version counter: the first forward gets copies, and later ones if they were written to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncpipe.errors import StageError
from asyncpipe.ops.device.memory_layout import overlaps
from asyncpipe.ops.torch_internals import version_of

__all__ = ["InputCopies"]


class InputCopies:
    """What one stage is to be given. One thread at a time runs it."""

    def __init__(self, always: bool) -> None:
        self._always = always
        self._overwrites: bool | None = None
        """Whether the first forward with copies wrote to them; ``None`` before it."""

    def given(self, received: Sequence[Tensor], repeated: bool) -> Sequence[Tensor]:
        """``received``, or copies. ``repeated`` is whether forwards are recomputed."""
        if self._always:
            return [tensor.clone() for tensor in received]
        if self._overwrites is False:
            return received
        copies = [tensor.clone() if repeated or tensor.requires_grad else tensor for tensor in received]
        if self._overwrites is None:
            for copy, tensor in zip(copies, received, strict=True):
                if tensor.requires_grad:
                    # Also without a graph, in a first run: torch.compile would compile once more for later ones.
                    copy.requires_grad_()
        return copies

    def saw(self, received: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """Called at the end of a forward. Raises ``StageError`` if it wrote to a copy of what no copy can be like."""
        if given is received:
            return
        for copy, tensor in zip(given, received, strict=True):
            if copy is not tensor and not tensor.is_contiguous() and version_of(copy):
                _refuse_shared_memory(tensor)
        if self._overwrites is None and not self._always:
            copies = [copy for copy, tensor in zip(given, received, strict=True) if copy is not tensor]
            if copies:
                self._overwrites = any(map(version_of, copies))


def _refuse_shared_memory(tensor: Tensor) -> None:
    if tensor.layout is torch.strided and overlaps(tuple(tensor.shape), tensor.stride()):
        raise StageError(
            "a stage overwrites in place what it received, a view whose elements share memory (shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()}), so it changes other elements than without stages; "
            "clone the view where it is made"
        )
