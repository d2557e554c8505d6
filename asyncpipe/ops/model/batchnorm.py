"""Batch norms that update their running statistics once a mini-batch.

In a pipeline an ordinary layer updates its running statistics once a micro-batch, so m times a step and from few
samples each time. Evaluation would then depend on how the mini-batch was cut. A deferred layer gathers the moments of
all micro-batches and makes one update when the step is over::

    F(0) ── count, mean, squared deviations ─┐
    F(1) ── count, mean, squared deviations ─┼─▶ merged ──commit()──▶ running_mean, running_var, num_batches_tracked
    F(2) ── count, mean, squared deviations ─┘          └─discard()─▶ nothing, where the step failed

Each micro-batch is still normalised with its own statistics, so outputs and gradients are those of the small batches.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncpipe.errors import OptionError
from asyncpipe.ops.autograd.checkpoint import is_recomputing
from asyncpipe.ops.torch_internals import BatchNorm

__all__ = [
    "BatchNormNotice",
    "DeferredBatchNorm",
    "DeferredBatchNorm1d",
    "DeferredBatchNorm2d",
    "DeferredBatchNorm3d",
    "Moments",
    "convert_deferred_batch_norm",
    "deferred_layers",
]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """The moments of a set of values, by channel: how many, their mean, and the sum of squared deviations from it."""

    count: int
    mean: Tensor
    deviations: Tensor

    @classmethod
    def of(cls, batch: Tensor) -> Moments:
        """The moments of ``batch``, whose channels are dimension 1, in float32 or wider and without a graph."""
        wide = batch.detach().to(torch.promote_types(batch.dtype, torch.float32))
        variance, mean = torch.var_mean(wide, [0, *range(2, batch.dim())], correction=0)
        count = batch.numel() // batch.size(1)
        return cls(count, mean, variance * count)

    @classmethod
    def from_tensors(cls, count: Tensor, mean: Tensor, deviations: Tensor) -> Moments:
        """The moments of which these are the ``tensors``. The host waits for the count."""
        return cls(int(count), mean, deviations)

    def tensors(self) -> list[Tensor]:
        """For another device: the count, on the host, and the others."""
        return [torch.tensor(self.count), self.mean, self.deviations]

    def merged(self, other: Moments) -> Moments:
        """The moments of both sets together, without the cancellation of a difference of sums of squares.

        T. F. Chan, G. H. Golub and R. J. LeVeque, Updating formulae and a pairwise algorithm for computing sample
        variances, Stanford STAN-CS-79-773 (1979).
        """
        count = self.count + other.count
        distance = other.mean - self.mean
        between = distance.square() * (self.count * other.count / count)
        return Moments(
            count, self.mean + distance * (other.count / count), self.deviations + other.deviations + between
        )


class DeferredBatchNorm(BatchNorm):
    """A batch norm that gathers the moments of micro-batches, and updates its running statistics on ``commit``.

    Base of ``DeferredBatchNorm1d``, ``2d`` and ``3d``. Each is also a ``BatchNorm1d``, ``2d`` or ``3d``, with the same
    arguments and state-dict keys. In evaluation, or with ``track_running_stats=False``, it behaves the same.

    In training, ``forward`` runs on the thread and stream of the layer's device, once for each micro-batch; a
    recomputation gathers nothing. ``commit`` and ``discard`` are called after the step by its caller, on streams that
    wait for the device's. Nothing is locked. A layer that the model calls twice makes one update from all its calls,
    where an ordinary layer makes one a call.

    The gathered moments are not in the state dict, but in copies and pickles of the layer.
    """

    gathered: Moments | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name, which callers may use
        """``input`` (samples, channels, …), normalised; in training with its own statistics, which are gathered.

        Raises ``ValueError`` as the ordinary layer does, for a wrong number of dimensions and for a micro-batch with
        only one value per channel, and gathers nothing then.
        """
        if not (self.training and self.track_running_stats):
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        output = functional.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)
        if not is_recomputing() and input.numel():
            moments = Moments.of(input)
            self.gathered = moments if self.gathered is None else self.gathered.merged(moments)
        return output

    def commit(self) -> None:
        """Update the running statistics as the ordinary layer does for the whole mini-batch, and gather anew.

        The variance is the unbiased one over all values of the mini-batch. Does nothing if nothing was gathered.
        """
        gathered, self.gathered = self.gathered, None
        if gathered is None or self.running_mean is None or self.running_var is None:
            return
        for tensor in (gathered.mean, gathered.deviations):
            if not tensor.is_cpu:
                # Hazard: this stream reads memory allocated on a compute stream. Once freed, the memory must not be
                # reused before that read is done.
                tensor.record_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))
        with torch.no_grad():
            weight = self._count_update(gathered.mean)
            for running, new in (
                (self.running_mean, gathered.mean),
                (self.running_var, gathered.deviations / (gathered.count - 1)),
            ):
                new = new.to(running.device)
                # Computed in the wide type, since a product in half precision would round twice.
                running.copy_(weight * new + (1 - weight) * running.to(new.dtype))

    def discard(self) -> None:
        """Forget what was gathered since the last ``commit``."""
        self.gathered = None

    def _count_update(self, like: Tensor) -> float | Tensor:
        """Count one update; the weight of the new statistics in it, as a tensor where the host would have to wait."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            return self.momentum
        if self.num_batches_tracked is None:
            return 0.0
        return self.num_batches_tracked.to(like.dtype).reciprocal()


class DeferredBatchNorm1d(DeferredBatchNorm, nn.BatchNorm1d):
    """A ``BatchNorm1d`` with deferred running statistics; see ``DeferredBatchNorm``."""


class DeferredBatchNorm2d(DeferredBatchNorm, nn.BatchNorm2d):
    """A ``BatchNorm2d`` with deferred running statistics; see ``DeferredBatchNorm``."""


class DeferredBatchNorm3d(DeferredBatchNorm, nn.BatchNorm3d):
    """A ``BatchNorm3d`` with deferred running statistics; see ``DeferredBatchNorm``."""


_DEFERRED: dict[type[nn.Module], type[DeferredBatchNorm]] = {
    nn.BatchNorm1d: DeferredBatchNorm1d,
    nn.BatchNorm2d: DeferredBatchNorm2d,
    nn.BatchNorm3d: DeferredBatchNorm3d,
}
_LAZY = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)


def convert_deferred_batch_norm(module: nn.Module) -> nn.Module:
    """``module`` with every ``BatchNorm1d``, ``2d`` and ``3d`` replaced by a deferred one.

    Layers are replaced in their parents; if ``module`` is such a layer itself, its replacement is returned. A new layer
    has the same parameters, buffers and hooks (the same objects) as the one that it replaces, so optimizers stay valid
    and the state dict keeps its keys. A layer used in several places is replaced by one new layer. Layers that track no
    running statistics, and deferred ones, are not replaced.

    Raises ``OptionError``, before anything is replaced, for a layer that tracks running statistics and is a
    ``SyncBatchNorm``, a lazy batch norm that has not run yet, or another subclass, whose own code would be lost.
    """
    for path, layer in module.named_modules():
        _check_layer(path, layer)
    plain = [layer for layer in module.modules() if type(layer) in _DEFERRED and layer.track_running_stats]
    twins = {layer: _deferred(layer) for layer in plain}
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if path and layer in twins:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, twins[layer])
    return twins.get(module, module)


class BatchNormNotice:
    """Tells once that batch norms normalise each micro-batch, so that results are not those of the whole mini-batch."""

    def __init__(self) -> None:
        self._has_looked = False

    def saw(self, model: nn.Module, microbatches: int) -> None:
        """Look at ``model`` before its first training step of several micro-batches."""
        if self._has_looked or microbatches == 1:
            return
        self._has_looked = True
        norms = [layer for layer in model.modules() if isinstance(layer, BatchNorm) and layer.training]
        if not all(isinstance(layer, DeferredBatchNorm) for layer in norms):  # Who defers them knows.
            _logger.warning(
                "batch norms normalise each micro-batch by itself, so the loss and the gradients are not those of the "
                "whole mini-batch; deferred_batch_norm=True keeps the running statistics of whole mini-batches, and "
                "norms without statistics of a batch (GroupNorm, LayerNorm) have no such difference"
            )


def deferred_layers(module: nn.Module) -> list[DeferredBatchNorm]:
    """The deferred batch norms in ``module``, each once, to ``commit`` or ``discard`` after a step."""
    return [layer for layer in module.modules() if isinstance(layer, DeferredBatchNorm)]


def _deferred(layer: nn.Module) -> nn.Module:
    kind = _DEFERRED[type(layer)]
    twin = kind.__new__(kind)
    # The same dictionaries, so that the replaced layer and handles of its hooks see changes of the new one.
    vars(twin).update(vars(layer))
    return twin


def _check_layer(path: str, layer: nn.Module) -> None:
    if isinstance(layer, torch.jit.ScriptModule) and "BatchNorm" in layer.original_name:
        raise OptionError(
            f"layer {path!r} is a {layer.original_name} in TorchScript, which cannot be deferred; leave it out of what "
            "is scripted"
        )
    if not isinstance(layer, BatchNorm) or not layer.track_running_stats:
        return
    if isinstance(layer, DeferredBatchNorm) or type(layer) in _DEFERRED:
        return
    name = type(layer).__name__
    which = f"layer {path!r} ({name})" if path else f"the module ({name})"
    if isinstance(layer, nn.SyncBatchNorm):
        raise OptionError(
            f"{which} gathers statistics from other processes, not from micro-batches; use BatchNorm1d, 2d or 3d"
        )
    if isinstance(layer, _LAZY):
        raise OptionError(f"{which} has no parameters yet; call the model once on a sample, then convert it")
    raise OptionError(
        f"{which} cannot be deferred, since a subclass of a batch norm may do more than one; use BatchNorm1d, 2d or 3d "
        "itself, or make the layer with track_running_stats=False"
    )
