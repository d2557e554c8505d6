"""Fork and Join: extra edges that order the nodes of a backward graph (torchgpipe, arXiv 2004.09910, section 3.2).

A *phony* is an empty tensor that only carries an edge of the autograd graph. ``fork`` makes one from a tensor, ``join``
makes a tensor depend on one. In backward the engine runs Join first, then the node between the two, then Fork::

    forward    x ──▶ Fork ──────────────▶ Join ──▶ y
                      └── phony ▶ Node ▶──┘
    backward   x ◀── Fork ◀────────────── Join ◀── y      Node's backward runs before every node that x depends on
                      └───── ◀ Node ◀─────┘
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["forget_failed_backward", "fork", "join", "phony"]


def phony(device: torch.device, *, requires_grad: bool) -> Tensor:
    """An empty tensor on ``device``, which takes no memory and no kernel."""
    return torch.empty(0, device=device, requires_grad=requires_grad)


def forget_failed_backward() -> None:
    """Drop what a backward that raised has left in this thread's queue of the engine: nodes that were ready, too.

    They keep their graph, with its activations, until the thread's next backward. This is one, of nothing.
    """
    with torch.enable_grad():
        phony(torch.device("cpu"), requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]


def fork(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """``tensor``, and a phony; the backward of what uses the phony runs before the backward of ``tensor``."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        result: tuple[Tensor, Tensor] = _Fork.apply(tensor)  # type: ignore[no-untyped-call]
        return result
    return tensor, phony(tensor.device, requires_grad=False)


def join(tensor: Tensor, phony: Tensor) -> Tensor:
    """``tensor``, which now also depends on ``phony``."""
    if torch.is_grad_enabled() and (tensor.requires_grad or phony.requires_grad):
        result: Tensor = _Join.apply(tensor, phony)  # type: ignore[no-untyped-call]
        return result
    return tensor


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> tuple[Tensor, Tensor]:
        # If nothing uses the tensor, its gradient is None instead of zeros.
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
