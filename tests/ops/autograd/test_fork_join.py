"""Fork and Join: the order of a backward graph, seen by autograd functions that log their backward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from asyncpipe.ops.autograd.fork_join import fork, join


class Note(torch.autograd.Function):
    """Passes a tensor on; its backward appends ``name`` to ``log``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str, log: list[str]) -> Tensor:
        ctx.name, ctx.log = name, log
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.log.append(ctx.name)
        return grads[0], None, None


def in_fresh_thread(function: Callable[[], Tensor]) -> Tensor:
    """``function()`` on a new thread, where autograd numbers nodes from 0: they count as older than all nodes here."""
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def two_branches(tied: bool) -> list[str]:
    """In which order two branches are passed in backward, made on two threads as two stages are."""
    log: list[str] = []
    for _ in range(20):
        torch.ones(1, requires_grad=True).exp()  # So that this thread's numbers are ahead of the fresh one's.
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    later, edge = fork(Note.apply(b, "later", log))
    sooner = in_fresh_thread(lambda: Note.apply(join(a, edge) if tied else a * 1, "sooner", log))
    torch.autograd.backward([later.sum(), sooner.sum()])
    assert a.grad is not None
    assert b.grad is not None
    assert (a.grad.tolist(), b.grad.tolist()) == ([1, 1], [1, 1])
    return log


def test_a_tie_decides_the_order() -> None:
    assert two_branches(tied=True) == ["sooner", "later"]
