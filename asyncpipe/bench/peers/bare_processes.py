"""The floor for workers: two plain processes that run 1F1B and leave tensors in shared memory, and nothing else.

Each micro-batch has a place of its own in the memory of a link, so nobody waits for room; a semaphore counts what is
there. No checks, no names, no times, no thread besides the one that computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from math import prod
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.bench.peers.bare_threads import order_of, run_order
from asyncpipe.bench.peers.cases import Case
from asyncpipe.bench.peers.two_processes import RANKS, Prepare

__all__ = ["bare_ranks"]


class _Link:
    """Tensors from one process to the other. A step uses all places, and begins when the one before has ended."""

    def __init__(self, shape: torch.Size, microbatches: int) -> None:
        context = get_context("spawn")
        self._shape = shape
        self._memory: Any = context.RawArray("f", microbatches * prod(shape))
        self._there = context.Semaphore(0)
        self._places = microbatches

    def open(self) -> tuple[Callable[[Tensor], None], Callable[[], Tensor]]:
        """What sends and what receives, for the process that calls."""
        places = cycle(torch.frombuffer(self._memory, dtype=torch.float32).view(self._places, *self._shape).unbind())

        def send(tensor: Tensor) -> None:
            next(places).copy_(tensor)
            self._there.release()

        def receive() -> Tensor:
            self._there.acquire()
            return next(places).detach()

        return send, receive


def bare_ranks(case: Case) -> Prepare:
    """What the two processes do. Their halves exchange one tensor of the inputs' type."""
    x, _ = case.batch()
    with torch.no_grad():
        between = case.model()[: case.stages // RANKS](x[: case.shape[0]])
    return partial(_rank, _Link(between.shape, case.microbatches), _Link(between.shape, case.microbatches))


def _rank(forward: _Link, backward: _Link, rank: int, half: nn.Sequential, case: Case) -> Callable[[], object]:
    (send, receive), (send_gradient, receive_gradient) = forward.open(), backward.open()
    x, target = (whole.chunk(case.microbatches) for whole in case.batch())
    order, first = order_of(rank, RANKS, case.microbatches), rank == 0

    def step() -> None:
        run_order(
            half,
            order,
            iter(x).__next__ if first else receive,
            None if first else target,
            send if first else None,
            receive_gradient,
            None if first else send_gradient,
            case.microbatches,
        )

    return step
