"""Entry and Exit: the nodes that a pipeline adds to the caller's autograd graph.

In the graph of ``y = pipe(x)``, all stages together are one entry node and one exit node per micro-batch. Fork chains
the exits, so that the engine runs the exit of micro-batch m-1 first and that of 0 last. The backward of an exit hands
its gradients to the scheduler without blocking. The backward of the entry runs last: it waits until the scheduler has
run the backward tasks, and returns the gradients of inputs and parameters::

    forward    x, parameters ──▶ Entry ─edge─▶ Exit 0 ──▶ Fork ─edge─▶ Exit 1 ──▶ Fork ─edge─▶ Exit 2
                                                            └──▶ y 0                └──▶ y 1     └──▶ y 2
    backward   x, parameters ◀── Entry ◀────── Exit 0 ◀── Fork ◀────── Exit 1 ◀── Fork ◀────── Exit 2
                                   │ waits       │ opens gate 0          │ opens gate 1          │ opens gate 2
                                   ▼             ▼                       ▼                       ▼
                                 the scheduler's backward graph, on the devices' own threads

The engine has one worker thread per CUDA device. A node that blocks there would stop every other backward on that
device. The entry's output is therefore a phony on the CPU: the engine then runs the entry on the thread that called
``backward``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncpipe.errors import BackwardError
from asyncpipe.ops.autograd.fork_join import fork, phony
from asyncpipe.ops.torch_internals import graph_is_kept, is_batch_of_gradients

__all__ = ["Backward", "attach"]

_CPU = torch.device("cpu")


class Backward(Protocol):
    """The pipeline's backward of one forward, as the entry and the exits use it."""

    def release(self, microbatch: int, gradients: Sequence[Tensor | None], *, retain: bool) -> None:
        """Take the gradients of a micro-batch's outputs, which its backward starts from. Must not block."""

    def finish(self) -> list[Tensor | None]:
        """Block until the backward is done; the gradients of the tensors that ``attach`` got as ``ends``."""


def attach(backward: Backward, ends: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The outputs of each micro-batch, whose gradients go to ``backward``.

    ``ends`` are the tensors that get gradients: inputs and parameters. Outputs that require no gradient still require
    none. Runs on the caller's thread, in grad mode.
    """
    start = phony(_CPU, requires_grad=True)
    edge: Tensor = _PipelineEntry.apply(start, backward, *ends)  # type: ignore[no-untyped-call]
    tied: list[list[Tensor]] = []
    for microbatch, tensors in enumerate(outputs):
        exits: list[Tensor] = list(_PipelineExit.apply(edge, backward, microbatch, *tensors))  # type: ignore[no-untyped-call]
        first = next((k for k, tensor in enumerate(exits) if tensor.requires_grad), None)
        if first is not None:
            # The next exit hangs on this fork, so its backward runs before the backward of this exit.
            exits[first], edge = fork(exits[first])
        tied.append(exits)
    return tied


class _PipelineEntry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _start: Tensor, backward: Backward, *ends: Tensor) -> Tensor:
        ctx.pipeline_backward = backward
        ctx.set_materialize_grads(False)
        return phony(_CPU, requires_grad=False)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.pipeline_backward.finish()


class _PipelineExit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: Tensor, backward: Backward, microbatch: int, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.pipeline_backward = backward
        ctx.microbatch = microbatch
        ctx.device = edge.device
        ctx.set_materialize_grads(False)
        tied = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(*(new for new, old in zip(tied, outputs, strict=True) if not old.requires_grad))
        return tied

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise BackwardError(
                "a pipeline cannot be differentiated twice (create_graph=True): its backward records no graph; use "
                "the bare model for double backward"
            )
        if any(gradient is not None and is_batch_of_gradients(gradient) for gradient in gradients):
            raise BackwardError(
                "a pipeline's backward takes one gradient at a time, and not a batch of them (is_grads_batched=True, "
                "vectorize=True); call it once for each, with retain_graph=True"
            )
        ctx.pipeline_backward.release(ctx.microbatch, gradients, retain=graph_is_kept())
        return phony(ctx.device, requires_grad=False), None, None, *[None] * len(gradients)
