"""One step, from the caller's mini-batch to its result; everything here runs on the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from asyncpipe.core.graph.lower import CheckpointMode
from asyncpipe.core.graph.task_graph import Phase
from asyncpipe.errors import LossError, OptionError
from asyncpipe.ops.autograd.caller_context import CallerContext
from asyncpipe.ops.autograd.random_streams import draw_step_seed
from asyncpipe.ops.device.copies import to_device
from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.device.streams import Fence
from asyncpipe.ops.execute.binder import Binder, Equipment, normalize
from asyncpipe.ops.execute.step_tensors import StepPlan, StepTensors
from asyncpipe.ops.model.batchnorm import DeferredBatchNorm
from asyncpipe.ops.model.microbatch import Arguments, CutBatch, cut, cut_alike, gather
from asyncpipe.pipeline.graph_cache import Graphs
from asyncpipe.pipeline.result import StepResult
from asyncpipe.runtime.execution import Execution
from asyncpipe.runtime.portal import Portal

if TYPE_CHECKING:
    from torch.amp import GradScaler

__all__ = ["NO_TARGET", "Machinery", "PreparedStep", "StepOptions"]

NO_TARGET: Any = object()
"""Stands for a target that was not given (``None`` is a target)."""


@dataclass(frozen=True, slots=True, eq=False)
class Machinery:
    """What all steps of a pipeline share."""

    module: nn.Module
    equipment: Equipment
    takes: Callable[[Arguments], dict[int, Any]]
    microbatches: int
    batch_dim: int
    checkpoint: CheckpointMode
    loss_fn: Callable[..., Any] | None
    mean: bool
    graphs: Graphs
    deferred: Sequence[DeferredBatchNorm]
    generator: torch.Generator | None = None
    """What step seeds are drawn from; torch's default CPU generator if absent."""

    def commit_statistics(self) -> None:
        """The forwards went well: deferred batch norms update their running statistics."""
        for layer in self.deferred:
            layer.commit()

    def discard_statistics(self) -> None:
        """The forwards failed: running statistics stay as they were."""
        for layer in self.deferred:
            layer.discard()


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How one step differs from the others."""

    return_outputs: bool = True
    update: bool = True
    scaler: GradScaler | None = None


class PreparedStep:
    """A step that is checked and cut: ``begin``, run ``graph`` with ``bind``, then ``finish`` or ``abandon``.

    Making one changes nothing but the caller's random state; raises ``BatchError`` or ``OptionError``.
    """

    def __init__(self, machinery: Machinery, x: Any, target: Any, options: StepOptions) -> None:
        self._machinery = machinery
        context = CallerContext.capture()
        self._training = machinery.module.training and context.grad and not context.inference
        _check_loss(machinery.loss_fn, target, self._training)
        pieces = cut(x, machinery.microbatches, dim=machinery.batch_dim)
        targets = () if target is NO_TARGET else cut_alike(target, pieces, dim=machinery.batch_dim)
        self._ready_made = pieces.ready_made
        self._plan = self._planned(pieces, target, options)
        phase = Phase.STEP if self._training else Phase.FORWARD
        self.graph = machinery.graphs(len(pieces.sizes), phase, machinery.checkpoint, options.update)
        self._fence = Fence(machinery.equipment.streams.values())
        self._tensors = StepTensors.of([machinery.takes(Arguments.wrap(piece)) for piece in pieces.pieces], targets)
        self._guards = False
        binder = Binder(self.graph, self._plan, self._tensors, machinery.equipment, context)
        self.bind, self.notes = binder.bind, binder.notes

    def _planned(self, pieces: CutBatch, target: Any, options: StepOptions) -> StepPlan:
        machinery = self._machinery
        has_loss = self._training or target is not NO_TARGET
        return StepPlan(
            loss=machinery.loss_fn if has_loss else None,
            weights=_weights(pieces.sizes, machinery.mean),
            scale=_scale(options.scaler, machinery.equipment.stages[-1].device) if self._training else None,
            seed=draw_step_seed(machinery.generator),
            checkpoint=machinery.checkpoint,
            keep_outputs=options.return_outputs or not has_loss,
            training=self._training,
            whole_step=True,
        )

    def begin(self) -> None:
        """Order the lanes behind what the caller has queued, and set earlier gradients aside."""
        self._machinery.equipment.ties.refresh()
        self._fence.begin()
        if self._training:
            self._machinery.equipment.guard.settle()
            self._guards = True
            self._machinery.equipment.guard.begin(self._machinery.module.parameters())

    def finish(self, execution: Execution, portal: Portal | None) -> StepResult:
        """The result of a step whose last task is issued; the caller's streams are ordered behind it."""
        losses = [loss for _, loss in sorted(self._tensors.losses.items())]
        outputs = [packet.rebuild(packet.tensors) for _, packet in sorted(self._tensors.outputs.items())]
        counts = list(self._tensors.counts.values())
        self._fence.end(leaf for leaf in tree_leaves([losses, counts, outputs]) if isinstance(leaf, Tensor))
        with torch.no_grad():
            loss = self._mean_loss(losses)
            gathered: Any = None
            if outputs:
                gathered = outputs if self._ready_made else gather(outputs, self._machinery.batch_dim)
            if self._training:
                self._commit()
        self._machinery.commit_statistics()
        self._tensors.close()
        return StepResult(loss, tuple(losses), gathered, execution, portal)

    def abandon(self) -> None:
        """Undo what the step did to the gradients and drop its tensors."""
        self._fence.end()
        if self._guards:
            self._machinery.equipment.guard.roll_back()
        self._machinery.equipment.ties.drop_gradients()
        self._machinery.discard_statistics()
        self._tensors.close()

    def _commit(self) -> None:
        # What was updated inside the step has no gradient any more.
        normalize(list(self._machinery.module.parameters()), self._tensors)
        self._guards = False
        self._machinery.equipment.guard.commit()

    def _mean_loss(self, losses: Sequence[Tensor]) -> Tensor | None:
        if not losses:
            return None
        counts = self._tensors.counts
        if counts and len(counts) < len(losses):
            raise LossError("loss_fn returned a count for some micro-batches and none for others; always return one")
        weights: Sequence[Tensor | float] = [counts[i] for i in range(len(losses))] if counts else self._plan.weights
        total = torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)]).sum()
        factor = self._tensors.normalizer(total.device)
        return total if factor is None else total * factor


def _weights(sizes: Sequence[int], mean: bool) -> list[float]:
    return [size / sum(sizes) if mean else 1.0 for size in sizes]


def _scale(scaler: GradScaler | None, device: Device) -> Tensor | None:
    """What ``scaler`` multiplies a loss by, on the device of the last stage."""
    if scaler is None:
        return None
    scaled: Tensor = scaler.scale(torch.ones((), device=scaler._device))
    return to_device(scaled, device.physical)


def _check_loss(loss_fn: Callable[..., Any] | None, target: Any, training: bool) -> None:
    if loss_fn is not None:
        return
    if training:
        raise OptionError("training needs a loss; give the pipeline a loss_fn, or call eval() to run forwards only")
    if target is not NO_TARGET:
        raise OptionError("a target was given, but the pipeline has no loss_fn to compare it with")
