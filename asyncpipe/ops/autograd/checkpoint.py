"""Checkpoint and Recompute: two autograd functions that share one recomputation.

The first run of a checkpointed forward keeps its inputs and drops its activations. Before the backward, the forward
runs a second time with a graph, and the backward goes through that graph. An R task may start the second run while
the gradient is still on its way; otherwise Recompute starts it, which Fork and Join order before Checkpoint::

    forward    inputs ──▶ Checkpoint ──▶ Fork ────────────────────▶ Join ──▶ outputs
                                          └── phony ▶ Recompute ▶──┘
    backward   inputs ◀── Checkpoint ◀── Fork ◀─────────────────── Join ◀── gradients
                              ▲           └────── ◀ Recompute ◀────┘
                              │                        │ runs it, unless an R task has
                              └──── Recomputation ◀────┘ leaves, outputs

The function that is passed in sets up everything that makes the second run equal to the first (random streams,
autocast, device). So the second run may happen on any thread, including those of the autograd engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from asyncpipe.errors import RecomputeError
from asyncpipe.ops.autograd.fork_join import fork, join, phony
from asyncpipe.ops.autograd.run_backward import as_of, run_backward
from asyncpipe.ops.torch_internals import version_of

__all__ = ["Recomputation", "checkpoint", "in_no_run", "is_checkpointing", "is_recomputing", "may_recompute_again"]

_running = threading.local()


def is_checkpointing() -> bool:
    """Whether this thread is in a first run, whose activations are dropped and recomputed later."""
    return getattr(_running, "what", None) == "first"


def is_recomputing() -> bool:
    """Whether this thread is in a second run, in which side effects of the forward must not happen again."""
    return getattr(_running, "what", None) in ("second", "again")


def may_recompute_again() -> bool:
    """Whether this thread is in a second run that another one may follow, for another backward of the same graph."""
    return getattr(_running, "what", None) == "again"


@contextmanager
def _running_as(what: str | None) -> Iterator[None]:
    before = getattr(_running, "what", None)
    _running.what = what
    try:
        yield
    finally:
        _running.what = before


def in_no_run() -> AbstractContextManager[None]:
    """For another pipeline's stages that a run calls: inside, this thread is in neither run."""
    return _running_as(None)


Function = Callable[[Sequence[Tensor]], list[Tensor]]


class Recomputation:
    """What a Checkpoint and its Recompute share: the saved inputs, and later the graph of the second run."""

    def __init__(self, function: Function, inputs: Sequence[Tensor]) -> None:
        self._function: Function | None = function
        self._inputs = list(inputs)
        self._versions = list(map(version_of, inputs))
        self._graph: tuple[list[Tensor], list[Tensor]] | None = None
        self.retain = False
        """Whether another backward may follow, which will recompute again."""

    def forward(self) -> list[tuple[Tensor, bool]]:
        """The outputs of the first run, detached, and whether each is an input that needs no gradient, passed on.

        Which outputs need a gradient is not known otherwise: there is no graph. Raises ``RecomputeError`` if the run
        overwrote its inputs.
        """
        assert self._function is not None
        # Aliases: a hook that the function registers on its input belongs to the second run, as its activations do.
        given = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self._inputs]
        with _running_as("first"):
            outputs = self._function(given)
        self._check_inputs()
        constant = {id(tensor) for tensor in given if not tensor.requires_grad}
        # Detached, so that no output is a view of an input.
        return [(output.detach(), id(output) in constant) for output in outputs]

    def run(self) -> None:
        """Do the second run, with a graph, unless it is done already."""
        if self._graph is not None:
            return
        if self._function is None:
            raise RecomputeError("this backward has run already; its activations are gone")
        self._check_inputs()
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self._inputs]
        with torch.enable_grad(), _running_as("again" if self.retain else "second"):
            self._graph = leaves, self._function(leaves)
        if not self.retain:
            self._inputs.clear()

    def _check_inputs(self) -> None:
        if list(map(version_of, self._inputs)) != self._versions:
            raise RecomputeError(
                "the input of a stage is overwritten in place, so the stage cannot be recomputed from it; use an "
                "operation that is not in place, or clone the input first"
            )

    def pop_graph(self) -> tuple[list[Tensor], list[Tensor]]:
        """Leaves and outputs of the second run, which is done now if it was not; they are not kept here."""
        self.run()
        assert self._graph is not None
        graph, self._graph = self._graph, None
        if not self.retain:
            self._function = None
        return graph


def checkpoint(function: Function, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Recomputation]:
    """The checkpointed outputs of ``function``, and the recomputation, so that it can be started early.

    ``function`` maps a list of tensors to a list of tensors and must compute the same when called again. Inputs that
    require no gradient and outputs that have none are allowed.
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
        outputs = shared.forward()
        constant = (x for x, passed in outputs if passed or not (x.is_floating_point() or x.is_complex()))
        ctx.mark_non_differentiable(*constant)
        return tuple(x for x, _ in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        leaves, outputs = ctx.shared.pop_graph()
        fitted = map(as_of, grads, outputs)
        pairs = [(t, g) for t, g in zip(outputs, fitted, strict=True) if t.requires_grad and g is not None]
        if pairs:
            # torch.autograd.backward would import sympy first, for more than half a second.
            run_backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs], retain=False)
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
