"""One step, from the caller's mini-batch to its result; everything here runs on the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from asyncpipe.core.graph import TaskGraph
from asyncpipe.core.lower import CheckpointMode
from asyncpipe.core.task import Lane
from asyncpipe.errors import OptionError
from asyncpipe.ops.binder import Binder, StepPlan
from asyncpipe.ops.context import CallerContext
from asyncpipe.ops.copy import Copier
from asyncpipe.ops.gradients import GradientGuard
from asyncpipe.ops.microbatch import gather, microbatch_sizes, scatter
from asyncpipe.ops.random import draw_step_seed
from asyncpipe.ops.stage import Stage
from asyncpipe.ops.stream import Fence, LaneStream
from asyncpipe.result import StepResult
from asyncpipe.runtime.driver import Execution
from asyncpipe.runtime.portal import Portal

__all__ = ["NO_TARGET", "Machinery", "PreparedStep"]

NO_TARGET: Any = object()
"""Stands for a target that was not given (``None`` is a target)."""


@dataclass(frozen=True, slots=True, eq=False)
class Machinery:
    """What all steps of a pipeline share."""

    module: nn.Module
    stages: Sequence[Stage]
    streams: Mapping[Lane, LaneStream]
    copiers: Mapping[Lane, Copier]
    microbatches: int
    checkpoint: CheckpointMode
    loss_fn: Callable[..., Tensor] | None
    mean: bool
    graph: Callable[[int, bool], TaskGraph]
    """The task graph for a number of micro-batches, with or without backward."""


class PreparedStep:
    """A step that is checked and scattered: ``begin``, run ``graph`` with ``bind``, then ``finish`` or ``abandon``.

    Making one changes nothing but the caller's random state; raises ``BatchError`` or ``OptionError``.
    """

    def __init__(self, machinery: Machinery, x: Any, target: Any, keep_outputs: bool) -> None:
        context = CallerContext.capture()
        training = machinery.module.training and context.grad and not context.inference
        _check_loss(machinery.loss_fn, target, training)
        sizes = microbatch_sizes(x, machinery.microbatches)
        self._weights = [size / sum(sizes) if machinery.mean else 1.0 for size in sizes]
        has_loss = training or target is not NO_TARGET
        plan = StepPlan(
            inputs=scatter(x, sizes),
            loss=machinery.loss_fn if has_loss else None,
            targets=[] if target is NO_TARGET else scatter(target, sizes, "the target"),
            weights=self._weights,
            seed=draw_step_seed(),
            checkpoint=machinery.checkpoint,
            keep_outputs=keep_outputs or not has_loss,
            training=training,
        )
        self.graph = machinery.graph(len(sizes), training)
        self._parameters = machinery.module.parameters() if training else ()
        self._guard = GradientGuard()
        self._fence = Fence(machinery.streams.values())
        self._binder = Binder(self.graph, plan, machinery.stages, machinery.streams, machinery.copiers, context)
        self.bind = self._binder.bind

    def begin(self) -> None:
        """Order the lanes behind what the caller has queued, and set earlier gradients aside."""
        self._fence.begin()
        self._guard.set_aside(self._parameters)

    def finish(self, execution: Execution, portal: Portal | None) -> StepResult:
        """The result of a step whose last task is issued; the caller's streams are ordered behind it."""
        losses = [loss for _, loss in sorted(self._binder.losses.items())]
        outputs = [output for _, output in sorted(self._binder.outputs.items())]
        self._fence.end(leaf for leaf in tree_leaves([losses, outputs]) if isinstance(leaf, Tensor))
        with torch.no_grad():
            gathered = gather(outputs) if outputs else None
            loss = sum(w * loss for w, loss in zip(self._weights, losses, strict=True)) if losses else None
            self._guard.commit()
        self._binder.close()
        return StepResult(loss if isinstance(loss, Tensor) else None, tuple(losses), gathered, execution, portal)

    def abandon(self) -> None:
        """Undo what the step did to the gradients and drop its tensors."""
        self._fence.end()
        self._guard.roll_back()
        self._binder.close()


def _check_loss(loss_fn: Callable[..., Tensor] | None, target: Any, training: bool) -> None:
    if loss_fn is not None:
        return
    if training:
        raise OptionError("training needs a loss; give the pipeline a loss_fn, or call eval() to run forwards only")
    if target is not NO_TARGET:
        raise OptionError("a target was given, but the pipeline has no loss_fn to compare it with")
