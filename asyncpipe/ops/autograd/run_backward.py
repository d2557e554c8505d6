"""``torch.autograd.backward`` without its cost in Python: 10 µs of checks that the tensors of stages always pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["run_backward"]

_engine = torch.autograd.Variable._execution_engine


def run_backward(tensors: Sequence[Tensor], gradients: Sequence[Tensor], *, retain: bool) -> None:
    """Add the gradients of the leaves that ``tensors`` were made from, given their own ``gradients``.

    These have the shapes of the tensors, since the leaves of another graph got them or the engine has checked them
    (it also checks them again). ``retain``: whether the graph is kept.
    """
    for tensor in tensors:
        if type(tensor) is not Tensor:
            # A class of its own may have its own backward.
            torch.autograd.backward(tensors, gradients, retain_graph=retain)
            return
    _engine.run_backward(
        tuple(tensors), tuple(gradients), retain, False, (), allow_unreachable=True, accumulate_grad=True
    )
