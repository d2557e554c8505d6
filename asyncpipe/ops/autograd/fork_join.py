"""Fork and Join: arbitrary order in a backward graph (torchgpipe, arXiv 2004.09910, section 3.2).

A *phony* is an empty tensor that only carries an edge of the autograd graph. ``fork`` takes one off a tensor,
``join`` ties one to a tensor. In backward the engine passes Join before it passes what made the phony, and
that before Fork::

    forward    x ──▶ Fork ──────────────▶ Join ──▶ y
                      └── phony ▶ Node ▶──┘
    backward   x ◀── Fork ◀────────────── Join ◀── y      Node's backward precedes everything behind x
                      └───── ◀ Node ◀─────┘
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["fork", "join", "phony"]


def phony(device: torch.device, *, requires_grad: bool) -> Tensor:
    """An empty tensor on ``device``: no memory, no kernel."""
    return torch.empty(0, device=device, requires_grad=requires_grad)


def fork(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """``tensor`` again, and a phony whose backward precedes the backward of ``tensor``."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        result: tuple[Tensor, Tensor] = _Fork.apply(tensor)  # type: ignore[no-untyped-call]
        return result
    return tensor, phony(tensor.device, requires_grad=False)


def join(tensor: Tensor, phony: Tensor) -> Tensor:
    """``tensor`` again, now also depending on ``phony``."""
    if torch.is_grad_enabled() and (tensor.requires_grad or phony.requires_grad):
        result: Tensor = _Join.apply(tensor, phony)  # type: ignore[no-untyped-call]
        return result
    return tensor


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> tuple[Tensor, Tensor]:
        # A tensor that nothing used has no gradient, rather than one of zeros.
        ctx.set_materialize_grads(False)
        return tensor.detach(), phony(tensor.device, requires_grad=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        return grads[0]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, _phony: Tensor) -> Tensor:
        ctx.device = _phony.device
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], phony(ctx.device, requires_grad=False)
