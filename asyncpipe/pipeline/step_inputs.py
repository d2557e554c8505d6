"""A mini-batch that is checked and cut, and what a step computes from it, wherever its stages are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from asyncpipe.core.graph.rows import Rows
from asyncpipe.core.graph.task_graph import Phase, TaskGraph
from asyncpipe.core.records.step_notes import StepSize
from asyncpipe.errors import BatchError, LossError, OptionError
from asyncpipe.ops.autograd.caller_context import CallerContext
from asyncpipe.ops.autograd.random_streams import draw_step_seed
from asyncpipe.ops.device.copies import to_device
from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.device.process_settings import ProcessSettings
from asyncpipe.ops.execute.step_tensors import StepPlan, StepTensors
from asyncpipe.ops.model.feed import Feed
from asyncpipe.ops.model.flops import peak_flops, token_count
from asyncpipe.ops.model.microbatch import Arguments, Microbatches, cut, cut_alike, gather, keywords
from asyncpipe.ops.torch_internals import device_of_scaler
from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.pipeline.wire_messages import Pieces

if TYPE_CHECKING:
    from torch.amp import GradScaler

__all__ = ["NO_TARGET", "CutInputs", "StepInputs", "StepOptions", "StepWork", "differing", "loss_weights", "target_of"]

_T = TypeVar("_T")

NO_TARGET: Any = object()
"""Stands for a target that was not given (``None`` is a target)."""


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How one step differs from the others."""

    return_outputs: bool = True
    update: bool = True
    scaler: GradScaler | None = None
    learning_rate: float | None = None
    num_items_in_batch: float | Tensor | None = None
    is_fed: bool = False
    """Whether the pipeline's feed makes the mini-batch."""
    seed: int | None = None
    """What the step's random numbers follow from, if it is drawn already."""


@dataclass(frozen=True, slots=True, eq=False)
class CutInputs:
    """A mini-batch, cut for the stages that take some of it."""

    sizes: Sequence[int]
    """Samples of each micro-batch."""
    ready_made: bool
    """Whether the caller has cut the mini-batch (``Microbatches``)."""
    takes: Sequence[Mapping[int, Any]]
    """By micro-batch: what each stage takes from the caller."""
    targets: Sequence[Any]
    has_target: bool
    is_padded_unevenly: bool
    """Whether a mean over samples would count the labels of some micro-batches too much."""
    tokens: int = 0
    """Of all micro-batches."""
    number: int | None = None
    """Of the step whose mini-batch a feed has made in the workers, where it stays."""

    @classmethod
    def of(cls, parts: PipelineParts, x: Any, target: Any = NO_TARGET, *, has_loss: bool) -> CutInputs:
        """``x`` and ``target`` in micro-batches. Raises ``BatchError``."""
        options = parts.options
        target = target_of(parts, x, target) if has_loss else target
        pieces = cut(keywords(x), options.pieces, dim=options.batch_dim).with_samples()
        targets = () if target is NO_TARGET else cut_alike(target, pieces, dim=options.batch_dim)
        means = has_loss and options.loss_fn is not None and options.loss_reduction == "mean"
        return cls(
            pieces.sizes,
            pieces.ready_made,
            parts.taken(pieces.pieces),
            targets,
            target is not NO_TARGET,
            means and any(parts.padded_labels.are_uneven(each, pieces.sizes) for each in (pieces.pieces, targets)),
            token_count(pieces.pieces),
        )

    @classmethod
    def from_feed(cls, parts: PipelineParts, number: int) -> CutInputs:
        """What the feed makes for step ``number``. Raises what it raises."""
        feed = parts.options.feed
        assert isinstance(feed, Feed)
        return cls.of(parts, *feed.batch(number), has_loss=True)

    def only(self, stages: Collection[int], rows: Rows, number: int | None = None) -> CutInputs:
        """What ``stages`` take of it, the last ones of their rows the targets; it is that of step ``number``."""
        takes = [{stage: value for stage, value in each.items() if stage in stages} for each in self.takes]
        takers = [rows.last_stage(i) in stages for i in range(len(self.targets))]
        targets = [target if takes_it else None for target, takes_it in zip(self.targets, takers, strict=True)]
        return replace(self, takes=takes, targets=targets if any(takers) else (), number=number)

    def spread(
        self,
        owned: Mapping[str, Sequence[int]],
        rows: Rows,
        fed: Collection[str],
        make: Callable[[CutInputs], _T],
    ) -> dict[str, _T]:
        """What ``make`` makes of what each worker takes, whose stages are in ``owned``: once for all that take nothing.

        The workers in ``fed`` have made the mini-batch, if it has a number.
        """
        takers = {stage for each in self.takes for stage in each}
        takers.update(rows.last_stage(i) for i in range(len(self.targets)))
        made: dict[tuple[tuple[int, ...], int | None], _T] = {}
        found = {}
        for name, stages in owned.items():
            key = tuple(sorted(takers.intersection(stages))), self.number if name in fed else None
            if key not in made:
                made[key] = make(self.only(key[0], rows, key[1]))
            found[name] = made[key]
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: values that lie behind each other in memory as one."""
        taking = {tuple(each) for each in self.takes}
        only = taking.pop() if len(taking) == 1 else ()
        # Where every micro-batch has one value for one stage, the values are pieces as well.
        stage = only[0] if len(only) == 1 else None
        takes = Pieces.of(self.takes if stage is None else [each[stage] for each in self.takes])
        rest = self.sizes, self.ready_made, self.has_target, self.is_padded_unevenly, self.tokens, self.number
        return _unpacked, (stage, takes, Pieces.of(self.targets), *rest)


def _unpacked(
    stage: int | None, takes: Pieces, targets: Pieces, sizes: Sequence[int], ready_made: bool, *rest: Any
) -> CutInputs:
    values = takes.unpacked()
    by_stage = values if stage is None else [{stage: value} for value in values]
    return CutInputs(sizes, ready_made, by_stage, targets.unpacked(), *rest)


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """What one step takes in, here or in a worker. Making it changes nothing but the caller's random state."""

    options: StepOptions
    plan: StepPlan
    """Without the loss, which is the pipeline's."""
    has_loss: bool
    context: CallerContext
    batch: CutInputs
    schedule: int
    """The number of the one that it follows, whatever others follow by the time when it begins."""

    @classmethod
    def prepare(cls, parts: PipelineParts, x: Any, target: Any, step: StepOptions) -> StepInputs:
        """Check and cut a mini-batch, on the caller's thread. Raises ``BatchError`` or ``OptionError``.

        ``x`` may be ``CutInputs``, with the target.
        """
        options = parts.options
        parts.check_model()
        step = replace(step, num_items_in_batch=_items(step.num_items_in_batch))
        context = CallerContext.capture(modes=parts.has_executors)
        training = parts.module.training and context.grad and not context.inference
        if isinstance(x, CutInputs):
            _check_loss(options.loss_fn, target, training)
            has_loss = training or (x.has_target and options.loss_fn is not None)
            batch = x
        else:
            target = target_of(parts, x, target)
            _check_loss(options.loss_fn, target, training)
            if training and target is NO_TARGET and options.loss_fn is parts.staged.own_loss:
                raise BatchError(
                    "the model's own loss needs labels; give them in the batch or as the target, or a loss_fn"
                )
            has_loss = training or target is not NO_TARGET
            if has_loss and target is NO_TARGET and parts.needs_target:
                raise BatchError("loss_fn compares an output with a target, and none was given; give step(x, target)")
            batch = CutInputs.of(parts, x, target, has_loss=has_loss)
            if training:
                parts.few_microbatches.saw(batch.sizes, options.pieces, ready_made=batch.ready_made)
        if training:
            parts.batch_norms.saw(parts.module, len(batch.sizes))
        plan = _make_plan(parts, batch.sizes, step, training=training, has_loss=has_loss)
        return cls(step, plan, has_loss, context, batch, parts.graphs.number)

    def emptied(self) -> StepInputs:
        """The same without the mini-batch."""
        return replace(self, batch=replace(self.batch, takes=(), targets=()))

    @property
    def training(self) -> bool:
        """Whether it has backwards."""
        return self.plan.training

    def size(self, parts: PipelineParts) -> StepSize:
        """What it works on."""
        samples, tokens, flops = sum(self.batch.sizes), self.batch.tokens, parts.options.flops
        if flops is None or not self.training:
            return StepSize(samples, tokens)
        peak = parts.options.peak_flops or peak_flops([stage.device for stage in parts.resources.stages])
        return StepSize(samples, tokens, flops.of(samples, tokens), peak)

    def graph(self, parts: PipelineParts) -> TaskGraph:
        """What it runs."""
        phase = Phase.STEP if self.training else Phase.FORWARD
        return parts.graphs(len(self.batch.sizes), phase, self.plan.checkpoint, self.options.update, self.schedule)

    def gather(self, outputs: Sequence[Any]) -> Any:
        """The step's outputs from those of its micro-batches; ``None`` if none were kept."""
        if not outputs or self.batch.ready_made:
            return list(outputs) or None
        return gather(outputs, self.plan.batch_dim, self.plan.weights)

    def mean_loss(self, parts: PipelineParts, losses: Sequence[Tensor], tensors: StepTensors) -> Tensor | None:
        """The mini-batch's loss from those of its micro-batches; ``None`` if there are none.

        Warns where labels are padded unevenly. Raises ``LossError`` if only some of the losses came with a count.
        """
        counts = tensors.counts
        if self.batch.is_padded_unevenly and not counts:
            parts.padded_labels.warn()
        if not losses:
            return None
        if counts and len(counts) < len(losses):
            raise LossError("loss_fn returned a count for some micro-batches and none for others; always return one")
        weights: Sequence[Tensor | float] = [counts[i] for i in range(len(losses))] if counts else self.plan.weights
        weighted = [(loss * weight).to(losses[0].device) for loss, weight in zip(losses, weights, strict=True)]
        total = torch.stack(weighted).sum()
        factor = tensors.normalizer(total.device)
        return total if factor is None else (total * factor).to(losses[0].dtype)


class StepWork(NamedTuple):
    """What one worker computes a part of a step with."""

    inputs: StepInputs
    """With what the worker's stages take. A mini-batch that has a number was made here (``make_batch``)."""
    epoch: int
    """One more after each step that failed or was cancelled; messages of older ones mean nothing."""
    settings: ProcessSettings | None
    """``None`` if they are torch's own."""
    overlaps: bool
    is_observed: bool


def _make_plan(
    parts: PipelineParts, sizes: Sequence[int], step: StepOptions, *, training: bool, has_loss: bool
) -> StepPlan:
    options = parts.options
    if step.learning_rate is not None and options.optimizer is None:
        raise OptionError("learning_rate is for the pipeline's own optimizers; give it an optimizer=")
    if step.learning_rate is not None and options.lr_schedule is not None:
        raise OptionError("the learning rate is that of the pipeline's lr_schedule; leave learning_rate out")
    if training and step.scaler is not None and options.optimizer is not None and step.update:
        raise OptionError(
            "a scaler's gradients are to be unscaled before an update, and the pipeline's own optimizers would not do "
            "that; give update=False and have the scaler step pipe.optimizers, or leave the scaler out"
        )
    splits_head = training and parts.staged.stages[-1].splits_head
    return StepPlan(
        loss=None,
        weights=loss_weights(sizes, options.loss_reduction == "mean"),
        scale=_scale(step.scaler, parts.resources.stages[-1].device) if training else None,
        seed=draw_step_seed(options.generator) if step.seed is None else step.seed,
        checkpoint=parts.checkpoint,
        keep_outputs=(step.return_outputs and not splits_head) or not has_loss,
        training=training,
        whole_step=True,
        learning_rate=step.learning_rate,
        gradient_norms=options.gradient_norms,
        clip_norm=options.clip_grad_norm,
        clip_value=options.clip_grad_value,
        sizes=differing(sizes),
        batch_dim=options.batch_dim,
        items=_items(step.num_items_in_batch),
    )


def _items(value: float | Tensor | None) -> float | None:
    """``num_items_in_batch`` as a number. The host waits for one that is on an accelerator."""
    if value is None:
        return None
    is_number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)
    if not is_number or isinstance(value, bool) or not float(value) >= 0:
        raise OptionError(f"num_items_in_batch must be a number of at least 0, or a tensor with one, got {value!r}")
    return float(value)


def target_of(parts: PipelineParts, x: Any, target: Any = NO_TARGET) -> Any:
    """``target``, or where none was given the labels in the mini-batch ``x``, if the model knows of labels."""
    own_loss = parts.staged.own_loss
    if target is not NO_TARGET or own_loss is None:
        return target
    pieces = [own_loss.target(Arguments.wrap(keywords(piece))) for piece in getattr(x, "pieces", (x,))]
    if any(piece is None for piece in pieces):
        return NO_TARGET
    return Microbatches(pieces) if isinstance(x, Microbatches) else pieces[0]


def differing(sizes: Sequence[int]) -> Sequence[int]:
    """``sizes`` if they differ, else nothing."""
    return tuple(sizes) if len(set(sizes)) > 1 else ()


def loss_weights(sizes: Sequence[int], mean: bool) -> list[float]:
    """What the loss of each micro-batch counts, from their numbers of samples."""
    # An empty batch has one loss, as it is.
    total = sum(sizes)
    return [size / total if mean and total else 1.0 for size in sizes]


def _scale(scaler: GradScaler | None, device: Device) -> Tensor | None:
    """The factor by which ``scaler`` multiplies a loss, on the device of the last stage."""
    if scaler is None:
        return None
    scaled: Tensor = scaler.scale(torch.ones((), device=device_of_scaler(scaler)))
    # Its memory belongs to the caller's stream, which waits for the lanes before it can be used again.
    return to_device(scaled, device.physical)


def _check_loss(loss_fn: Callable[..., Any] | None, target: Any, training: bool) -> None:
    if loss_fn is not None:
        return
    if training:
        raise OptionError("training needs a loss; give the pipeline a loss_fn, or call eval() to run forwards only")
    if target is not NO_TARGET:
        raise OptionError("a target was given, but the pipeline has no loss_fn to compare it with")
