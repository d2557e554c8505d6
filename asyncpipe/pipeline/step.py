"""``StepProtocol``, by which every step runs, and ``PreparedStep``, one whole training or evaluation step.

Everything here runs on the caller's thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from asyncpipe.core.graph.task_graph import Phase, TaskGraph, Wiring
from asyncpipe.errors import LossError, OptionError
from asyncpipe.ops.autograd.caller_context import CallerContext
from asyncpipe.ops.autograd.random_streams import draw_step_seed, turns_paused
from asyncpipe.ops.device.copies import to_device
from asyncpipe.ops.device.device_errors import is_device_error
from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.device.streams import Fence
from asyncpipe.ops.execute.binder import Binder, normalize
from asyncpipe.ops.execute.step_tensors import StepPlan, StepTensors
from asyncpipe.ops.model.microbatch import Arguments, CutBatch, cut, cut_alike, gather, keywords
from asyncpipe.ops.model.nested import tensors_of
from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.pipeline.pool import Tenancy
from asyncpipe.pipeline.result import StepResult
from asyncpipe.runtime.execution import Execution
from asyncpipe.runtime.started_step import Line, StartedStep

if TYPE_CHECKING:
    from torch.amp import GradScaler

__all__ = ["NO_TARGET", "PreparedStep", "StepOptions", "StepProtocol", "loss_weights"]

_Result = TypeVar("_Result")

NO_TARGET: Any = object()
"""Stands for a target that was not given (``None`` is a target)."""


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How one step differs from the others."""

    return_outputs: bool = True
    update: bool = True
    scaler: GradScaler | None = None


class StepProtocol(ABC, Generic[_Result]):
    """How every step runs: begin, run its graph, then finish or, after any exception, abandon.

    A subclass prepares the step in its constructor: it checks and cuts the mini-batch, and changes nothing yet.
    ``run`` or ``run_blocking`` is then called once.
    """

    def __init__(
        self,
        parts: PipelineParts,
        tenancy: Tenancy,
        graph: TaskGraph,
        plan: StepPlan,
        tensors: StepTensors,
        context: CallerContext,
    ) -> None:
        self.parts = parts
        self.tenancy = tenancy
        self._graph = graph
        self._plan = plan
        self._tensors = tensors
        self._context = context
        self._fence = Fence(parts.resources.streams.values(), tensors.given())
        self._binder = Binder(graph, plan, tensors, parts.resources, context)

    async def run(self) -> _Result:
        """Run the step on the pipeline's loop, from a coroutine of any loop."""
        with self._begun():
            execution = await self.tenancy.pool.run(self._execution())
            try:
                return self._finish(execution)
            except RuntimeError as error:
                if is_device_error(error):
                    # One of the step's kernels failed after it was queued: the error of its task says which.
                    await self.tenancy.pool.run(execution.completed())
                raise

    def run_blocking(self) -> _Result:
        """Run the step on the pipeline's loop, which is in a thread of its own, and block until it is issued."""
        with self._begun():
            with turns_paused():
                execution = self.tenancy.pool.call(self._execution())
            try:
                return self._finish(execution)
            except RuntimeError as error:
                if is_device_error(error):
                    self.tenancy.pool.call(execution.completed())  # As above.
                raise

    @contextmanager
    def _begun(self) -> Iterator[None]:
        """Begin the step, and abandon it if this or the block raises."""
        try:
            self._begin()
            yield
        except BaseException:
            self._abandon()
            raise

    def _execution(self) -> Coroutine[Any, Any, Execution]:
        return self.tenancy.step(self._graph, self._binder.bind, self._binder.around, self._binder.notes)

    @abstractmethod
    def _begin(self) -> None:
        """Order the lanes behind what the caller has queued."""

    @abstractmethod
    def _finish(self, execution: Execution) -> _Result:
        """The result of a step whose last task is issued. Orders the caller's streams behind the step."""

    def _abandon(self) -> None:
        """Undo what the step did to running statistics, and drop its tensors."""
        self.parts.discard_statistics()
        self._tensors.close()
        # The device comes last: if it has failed, every call fails, and the error that is raised already says more.
        with suppress(Exception):
            self._fence.end()


class PreparedStep(StepProtocol[StepResult]):
    """A mini-batch that is checked and cut, for one step with a loss, or for forwards only in evaluation mode.

    Making one changes nothing but the caller's random state. Raises ``BatchError`` or ``OptionError``.
    """

    def __init__(self, parts: PipelineParts, tenancy: Tenancy, x: Any, target: Any, step: StepOptions) -> None:
        options = parts.options
        context = CallerContext.capture()
        self._training = parts.module.training and context.grad and not context.inference
        _check_loss(options.loss_fn, target, self._training)
        pieces = cut(keywords(x), options.microbatches, dim=options.batch_dim).with_samples()
        targets = () if target is NO_TARGET else cut_alike(target, pieces, dim=options.batch_dim)
        self._ready_made = pieces.ready_made
        self._has_set_gradients_aside = False
        self._is_started = False
        self._has_scaler = step.scaler is not None
        plan = self._make_plan(parts, pieces, self._training or target is not NO_TARGET, step)
        phase = Phase.STEP if self._training else Phase.FORWARD
        graph = parts.graphs(len(pieces.sizes), phase, plan.checkpoint, step.update)
        tensors = StepTensors.of([parts.takes(Arguments.wrap(piece)) for piece in pieces.pieces], targets)
        means = plan.loss is not None and options.loss_reduction == "mean"
        self._is_padded_unevenly = means and any(
            parts.padded_labels.are_uneven(each, pieces.sizes) for each in (pieces.pieces, targets)
        )
        super().__init__(parts, tenancy, graph, plan, tensors, context)

    def _make_plan(self, parts: PipelineParts, pieces: CutBatch, has_loss: bool, step: StepOptions) -> StepPlan:
        options = parts.options
        return StepPlan(
            loss=options.loss_fn if has_loss else None,
            weights=loss_weights(pieces.sizes, options.loss_reduction == "mean"),
            scale=_scale(step.scaler, parts.resources.stages[-1].device) if self._training else None,
            seed=draw_step_seed(options.generator),
            checkpoint=parts.checkpoint,
            keep_outputs=step.return_outputs or not has_loss,
            training=self._training,
            whole_step=True,
        )

    def _begin(self) -> None:
        resources = self.parts.resources
        if self._training and not self._is_started:
            resources.guard.enter(self, self)
        resources.ties.refresh()
        self._tensors.caller_ready = self._fence.begin()
        if self._training and not self._is_started:
            self._has_set_gradients_aside = True
            resources.guard.begin(self.parts.module.parameters())

    def _finish(self, execution: Execution) -> StepResult:
        losses = [loss for _, loss in sorted(self._tensors.losses.items())]
        outputs = [packet.rebuild(packet.tensors) for _, packet in sorted(self._tensors.outputs.items())]
        counts = list(self._tensors.counts.values())
        if self._is_padded_unevenly and not counts:
            self.parts.padded_labels.warn()
        self._fence.end(tensors_of([losses, counts, outputs]))
        with torch.no_grad():
            loss = self._mean_loss(losses)
            gathered: Any = None
            if outputs:
                dim, weights = self.parts.options.batch_dim, self._plan.weights
                gathered = outputs if self._ready_made else gather(outputs, dim, weights)
            if self._training and not self._is_started:
                self._commit_gradients()
        self.parts.commit_statistics()
        self._tensors.close()
        return StepResult(loss, tuple(losses), gathered, execution, self.tenancy.pool.portal)

    def _abandon(self) -> None:
        if self._has_set_gradients_aside:
            self.parts.resources.guard.roll_back()
            self.parts.resources.ties.drop_gradients()
        super()._abandon()
        self.parts.resources.guard.leave(self)

    # Steps that overlap (``steps.py``), whose gradients are set aside, and restored, by their run

    @property
    def training(self) -> bool:
        """Whether it has backwards."""
        return self._training

    @property
    def overlaps(self) -> bool:
        """Whether it may be under way together with others: all that a step leaves behind is made by its tasks."""
        parts, graph = self.parts, self._graph
        resources = parts.resources
        if graph.rule is not None or resources.ties.links or parts.deferred or not self.tenancy.overlaps_steps:
            return False
        if not self._training:
            return True
        if self._has_scaler or not set(Wiring.chain(graph.shape.stages).links) <= set(graph.wiring.links):
            return False
        updated = {
            id(parameter)
            for stage in graph.wiring.updates
            for group in resources.optimizers[stage].param_groups
            for parameter in group["params"]
        }
        loss = parts.options.loss_fn
        others = loss.parameters() if isinstance(loss, nn.Module) else ()
        # Parameters of the loss have an optimizer of the caller's, which runs between two steps.
        return not any(p.requires_grad for p in others) and all(
            id(p) in updated for p in parts.module.parameters() if p.requires_grad
        )

    def start(self, line: Line) -> StartedStep:
        """Begin it behind the last step of ``line``; then ``finish`` or ``drop`` it."""
        self._is_started = True
        with self._begun():
            return self.tenancy.start(self._graph, self._binder.bind, self._binder.around, self._binder.notes, line)

    def finish(self, execution: Execution) -> StepResult:
        """Its result; its last task is issued. If this raises, it is still to be dropped."""
        return self._finish(execution)

    def drop(self) -> None:
        """Drop its tensors; no thread uses it any more."""
        self._abandon()

    def _commit_gradients(self) -> None:
        # Parameters that were updated inside the step have no gradient any more.
        normalize(list(self.parts.module.parameters()), self._tensors)
        self.parts.resources.guard.commit()
        self._has_set_gradients_aside = False
        self.parts.resources.guard.leave(self)

    def _mean_loss(self, losses: Sequence[Tensor]) -> Tensor | None:
        if not losses:
            return None
        counts = self._tensors.counts
        if counts and len(counts) < len(losses):
            raise LossError("loss_fn returned a count for some micro-batches and none for others; always return one")
        weights: Sequence[Tensor | float] = [counts[i] for i in range(len(losses))] if counts else self._plan.weights
        total = torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)]).sum()
        factor = self._tensors.normalizer(total.device)
        return total if factor is None else (total * factor).to(losses[0].dtype)


def loss_weights(sizes: Sequence[int], mean: bool) -> list[float]:
    """What the loss of each micro-batch counts, from their numbers of samples."""
    # An empty batch has one loss, as it is.
    total = sum(sizes)
    return [size / total if mean and total else 1.0 for size in sizes]


def _scale(scaler: GradScaler | None, device: Device) -> Tensor | None:
    """The factor by which ``scaler`` multiplies a loss, on the device of the last stage."""
    if scaler is None:
        return None
    scaled: Tensor = scaler.scale(torch.ones((), device=scaler._device))
    # Its memory belongs to the caller's stream, which waits for the lanes before it can be used again.
    return to_device(scaled, device.physical)


def _check_loss(loss_fn: Callable[..., Any] | None, target: Any, training: bool) -> None:
    if loss_fn is not None:
        return
    if training:
        raise OptionError("training needs a loss; give the pipeline a loss_fn, or call eval() to run forwards only")
    if target is not NO_TARGET:
        raise OptionError("a target was given, but the pipeline has no loss_fn to compare it with")
