"""``torch.autograd.backward`` without its cost in Python: 10 µs of checks that the tensors of stages always pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asyncpipe.ops.torch_internals import jagged_like, run_engine

__all__ = ["as_of", "run_backward"]


def run_backward(tensors: Sequence[Tensor], gradients: Sequence[Tensor], *, retain: bool) -> None:
    """Add the gradients of the leaves that ``tensors`` were made from, given their own ``gradients``.

    These have the shapes of the tensors, since the leaves of another graph got them or the engine has checked them
    (it also checks them again). ``retain``: whether the graph is kept.
    """
    # A class of tensors may have its own backward.
    if any(type(tensor) is not Tensor for tensor in tensors):
        torch.autograd.backward(tensors, gradients, retain_graph=retain)
    else:
        run_engine(tuple(tensors), tuple(gradients), retain, False, (), allow_unreachable=True, accumulate_grad=True)


def as_of(gradient: Tensor | None, output: Any) -> Tensor | None:
    """A gradient of what a first run has sent, for ``output`` of the second run, whose sizes may be other symbols."""
    return gradient if gradient is None or gradient.layout is not torch.jagged else jagged_like(gradient, output)
