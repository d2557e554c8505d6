"""Entry and Exit: where a pipeline's local graphs meet the caller's own autograd graph.

``y = pipe(x)`` hangs on one exit node per micro-batch and one entry node. Fork chains the exits, so that the
engine releases micro-batch m-1 first and 0 last, whatever its own order would be. Each exit hands its gradients to
the scheduler without blocking; the entry, which runs last, waits for the backward graph and returns the gradients
of inputs and parameters::

    forward    x, parameters ──▶ Entry ─edge─▶ Exit 0 ──▶ Fork ─edge─▶ Exit 1 ──▶ Fork ─edge─▶ Exit 2
                                                            └──▶ y 0                └──▶ y 1     └──▶ y 2
    backward   x, parameters ◀── Entry ◀────── Exit 0 ◀── Fork ◀────── Exit 1 ◀── Fork ◀────── Exit 2
                                   │ waits       │ opens gate 0          │ opens gate 1          │ opens gate 2
                                   ▼             ▼                       ▼                       ▼
                                 the scheduler's backward graph, on the devices' own threads

The engine has one worker thread per CUDA device, and a node that blocks there stops every backward on it. So the
entry's edge is a phony on the CPU: the engine runs the entry on the thread that called ``backward``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncpipe.errors import BackwardError
from asyncpipe.ops.autograd.fork_join import fork, phony

__all__ = ["Backward", "attach"]

_CPU = torch.device("cpu")


class Backward(Protocol):
    """The backward of one forward, as the border sees it."""

    def release(self, microbatch: int, gradients: Sequence[Tensor | None], *, retain: bool) -> None:
        """Take the gradients of a micro-batch's outputs to its last stage. Must not block."""

    def finish(self) -> list[Tensor | None]:
        """Block until the backward is done; the gradients of what ``attach`` was given as ``ends``."""


def attach(backward: Backward, ends: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The outputs of each micro-batch, tied to ``backward``.

    ``ends`` are the tensors that gradients go on to: inputs and parameters. Outputs that require no gradient stay
    as they are. Runs on the caller's thread, in grad mode.
    """
    start = phony(_CPU, requires_grad=True)
    edge: Tensor = _PipelineEntry.apply(start, backward, *ends)  # type: ignore[no-untyped-call]
    tied: list[list[Tensor]] = []
    for microbatch, tensors in enumerate(outputs):
        exits: list[Tensor] = list(_PipelineExit.apply(edge, backward, microbatch, *tensors))  # type: ignore[no-untyped-call]
        first = next((k for k, tensor in enumerate(exits) if tensor.requires_grad), None)
        if first is not None:
            # The fork of an exit is the edge of the next one, whose backward therefore comes first.
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
        retain: bool = torch._C._autograd._get_current_graph_task_keep_graph()
        ctx.pipeline_backward.release(ctx.microbatch, gradients, retain=retain)
        return phony(ctx.device, requires_grad=False), None, None, *[None] * len(gradients)
