"""The sum of a loss over chunks of rows, one after the other, so that what is computed of all rows never exists whole.

The forward computes the gradients as well, chunk by chunk, as LigerFusedLinearCrossEntropy does (liger-kernel, arXiv
2410.10989). The backward multiplies them by the gradient of the sum::

    rows 0-127     head ─▶ logits ─▶ loss ─▶ gradients of these rows, of the head's parameters ─┐ added up
    rows 128-255   head ─▶ logits ─▶ loss ─▶ gradients of these rows, of the head's parameters ─┤
    …                                                                                           ▼ kept for the backward

A forward without gradients, as the first run of a checkpoint is, keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from asyncpipe.ops.autograd.parameter_hooks import hooked, without_hooks

__all__ = ["chunked_sum"]


def chunked_sum(
    loss: Callable[[Tensor, Tensor], Tensor],
    rows: Tensor,
    labels: Tensor,
    parameters: Sequence[nn.Parameter],
    *,
    chunk: int,
) -> Tensor:
    """The sum of ``loss(some rows, their labels)`` over chunks of ``chunk`` rows.

    ``parameters`` are all that the loss uses. It has one backward, which makes no graph.
    """
    records = torch.is_grad_enabled() and any(each.requires_grad for each in (rows, *parameters))
    total: Tensor = _ChunkedSum.apply(loss, chunk, records, labels, rows, *parameters)  # type: ignore[no-untyped-call]
    return total


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        loss: Callable[[Tensor, Tensor], Tensor],
        chunk: int,
        records: bool,
        labels: Tensor,
        rows: Tensor,
        *parameters: nn.Parameter,
    ) -> Tensor:
        trained = [each for each in parameters if each.requires_grad] if records else []
        sums: list[Tensor | None] = [None] * len(trained)
        of_rows = torch.zeros_like(rows) if records and rows.requires_grad else None
        totals = []
        # The whole gradient goes through the parameters' hooks, not that of each chunk. What the graph of a chunk saves
        # is gone with the chunk: hooks of saved tensors, which count or offload them, do not get it.
        saved = saved_tensors_hooks(Tensor.detach, Tensor.detach)
        with torch.set_grad_enabled(records), saved, without_hooks(hooked(trained)):
            for begin in range(0, max(len(rows), 1), chunk):
                piece = rows[begin : begin + chunk].detach().requires_grad_(of_rows is not None)
                total = loss(piece, labels[begin : begin + chunk])
                totals.append(total.detach())
                if records:
                    ends = [*([] if of_rows is None else [piece]), *trained]
                    made = list(torch.autograd.grad(total, ends, allow_unused=True))
                    if of_rows is not None and (gradient := made.pop(0)) is not None:
                        of_rows[begin : begin + chunk] = gradient
                    for k, gradient in enumerate(made):
                        before = sums[k]
                        if gradient is not None:
                            sums[k] = gradient if before is None else before.add_(gradient)
        found = iter(sums)
        ctx.save_for_backward(
            of_rows, *(next(found) if records and each.requires_grad else None for each in parameters)
        )
        return torch.stack(totals).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        # In place, since nobody else has them; autograd refuses a second backward.
        return None, None, None, None, *(None if each is None else each.mul_(gradient) for each in ctx.saved_tensors)
