"""Two processes with the whole model each, which train on half of the mini-batch and add up their gradients over gloo.

A step ends with the update, which has a rate of 0: weights stay as they are, and gradients can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, distributed, nn

from asyncpipe.bench.cases import Case, loss_fn
from benchmarks.peers.two_processes import meet

__all__ = ["all_reduce_rank", "ddp_rank"]


def ddp_rank(store: Path, rank: int, model: nn.Module, case: Case) -> Callable[[], object]:
    """What a rank of ``DistributedDataParallel`` does in a step: its last backward adds up the gradients."""
    meet(store, rank)
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer, pieces = torch.optim.SGD(model.parameters(), lr=0.0), _pieces(rank, case)

    def step() -> None:
        for number, (values, target) in enumerate(pieces, 1):
            with nullcontext() if number == len(pieces) else wrapped.no_sync():
                torch.autograd.backward(loss_fn(wrapped(values), target) / len(pieces))
        optimizer.step()

    return step


def all_reduce_rank(store: Path, rank: int, model: nn.Module, case: Case) -> Callable[[], object]:
    """What a bare process does in a step: its gradients become one vector, which ``all_reduce`` adds up."""
    meet(store, rank)
    parameters, pieces = list(model.parameters()), _pieces(rank, case)
    optimizer = torch.optim.SGD(parameters, lr=0.0)

    def step() -> None:
        for values, target in pieces:
            torch.autograd.backward(loss_fn(model(values), target) / (2 * len(pieces)))
        flat = torch.cat([parameter.grad.view(-1) for parameter in parameters if parameter.grad is not None])
        distributed.all_reduce(flat)
        for parameter, values in zip(
            parameters, flat.split_with_sizes([each.numel() for each in parameters]), strict=True
        ):
            parameter.grad = values.view_as(parameter)
        optimizer.step()

    return step


def _pieces(rank: int, case: Case) -> Sequence[tuple[Tensor, Tensor]]:
    """The micro-batches of a rank."""
    x, target = (whole.chunk(2)[rank].chunk(case.microbatches // 2) for whole in case.batch())
    return list(zip(x, target, strict=True))
