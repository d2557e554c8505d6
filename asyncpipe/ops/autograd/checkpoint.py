"""Checkpoint and Recompute: two autograd functions that share one recomputation.

A checkpointed forward keeps its inputs and drops everything else. Before its backward, the forward runs once
more with grad, and the backward goes through that second graph. The second run can be started from outside,
by an R task, while the gradient is still on its way; Fork and Join see to it that it happens at the latest
when the backward reaches it::

    forward    inputs ──▶ Checkpoint ──▶ Fork ────────────────────▶ Join ──▶ outputs
                                          └── phony ▶ Recompute ▶──┘
    backward   inputs ◀── Checkpoint ◀── Fork ◀─────────────────── Join ◀── gradients
                              ▲           └────── ◀ Recompute ◀────┘
                              │                        │ runs it, unless an R task did
                              └──── Recomputation ◀────┘ leaves, outputs

Whatever a second run needs to equal the first (random streams, autocast, device) is part of the function that
is passed in, so that it holds on every thread, the engine's own ones included.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from asyncpipe.errors import RecomputeError
from asyncpipe.ops.autograd.fork_join import fork, join, phony

__all__ = ["Recomputation", "checkpoint", "is_checkpointing", "is_recomputing"]

_running = threading.local()


def is_checkpointing() -> bool:
    """Whether this thread is in a first run, whose activations are dropped and recomputed later."""
    return getattr(_running, "what", None) == "first"


def is_recomputing() -> bool:
    """Whether this thread is in a second run: side effects of the forward have happened already."""
    return getattr(_running, "what", None) == "second"


@contextmanager
def _running_as(what: str) -> Iterator[None]:
    before = getattr(_running, "what", None)
    _running.what = what
    try:
        yield
    finally:
        _running.what = before


Function = Callable[[Sequence[Tensor]], list[Tensor]]


class Recomputation:
    """The shared memory of a Checkpoint and its Recompute: from the saved inputs to a graph to go back through."""

    def __init__(self, function: Function, inputs: Sequence[Tensor]) -> None:
        self._function: Function | None = function
        self._inputs = list(inputs)
        self._versions = [tensor._version for tensor in inputs]
        self._graph: tuple[list[Tensor], list[Tensor]] | None = None
        self.retain = False
        """Whether another backward will come for it, and recompute once more."""

    def forward(self) -> list[Tensor]:
        """The first run: outputs without a graph. Raises ``RecomputeError`` if it overwrote its inputs."""
        assert self._function is not None
        with _running_as("first"):
            outputs = self._function(self._inputs)
        self._check_inputs()
        return outputs

    def run(self) -> None:
        """The second run, with a graph; does nothing if it has run already."""
        if self._graph is not None:
            return
        if self._function is None:
            raise RecomputeError("this backward has run already; its activations are gone")
        self._check_inputs()
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self._inputs]
        with torch.enable_grad(), _running_as("second"):
            self._graph = leaves, self._function(leaves)
        if not self.retain:
            self._inputs.clear()

    def _check_inputs(self) -> None:
        if [tensor._version for tensor in self._inputs] != self._versions:
            raise RecomputeError(
                "the input of a stage is overwritten in place, so the stage cannot be recomputed from it; use an "
                "operation that is not in place, or checkpoint='never'"
            )

    def take(self) -> tuple[list[Tensor], list[Tensor]]:
        """Leaves and outputs of the second run, which is started if need be; they are kept no longer."""
        self.run()
        assert self._graph is not None
        graph, self._graph = self._graph, None
        if not self.retain:
            self._function = None
        return graph


def checkpoint(function: Function, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Recomputation]:
    """The outputs of ``function`` with its recomputation woven in, and the handle to start that early.

    ``function`` maps a list of tensors to a list of tensors and must do the same thing when called again.
    Inputs that require no gradient are allowed, as are outputs that have none.
    """
    shared = Recomputation(function, inputs)
    device = inputs[0].device if inputs else torch.device("cpu")
    start = phony(device, requires_grad=True)
    outputs: list[Tensor] = list(_Checkpoint.apply(start, shared, *inputs))  # type: ignore[no-untyped-call]
    first = next((k for k, tensor in enumerate(outputs) if tensor.requires_grad), None)
    if first is not None:
        outputs[first], edge = fork(outputs[first])
        edge = _Recompute.apply(edge, shared)  # type: ignore[no-untyped-call]
        outputs[first] = join(outputs[first], edge)
    return outputs, shared


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _phony: Tensor, shared: Recomputation, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.shared = shared
        ctx.set_materialize_grads(False)
        # A detached output is no view of an input, whatever the function returned.
        outputs = tuple(tensor.detach() for tensor in shared.forward())
        ctx.mark_non_differentiable(*(tensor for tensor in outputs if not _can_differentiate(tensor)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        leaves, outputs = ctx.shared.take()
        pairs = [(t, g) for t, g in zip(outputs, grads, strict=True) if t.requires_grad and g is not None]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
        return None, None, *(leaf.grad for leaf in leaves)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: Tensor, shared: Recomputation) -> Tensor:
        ctx.shared = shared
        return edge.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.shared.run()
        return grads[0], None


def _can_differentiate(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
