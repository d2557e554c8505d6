"""Batch norm whose running statistics follow mini-batches, not micro-batches.

A bare layer in a pipeline would update its running statistics once a micro-batch, that is m times a step, and with
variances of a few samples each: evaluation would then depend on how the mini-batch was cut. A deferred layer
gathers what the whole mini-batch's update needs and makes that one update when the step is over::

    F(0) ── count, mean, squared deviations ─┐
    F(1) ── count, mean, squared deviations ─┼─▶ merged ──commit()──▶ running_mean, running_var, num_batches_tracked
    F(2) ── count, mean, squared deviations ─┘          └─discard()─▶ nothing, where the step failed

Each micro-batch is still normalised with its own statistics, so outputs and gradients are those of small batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from asyncpipe.errors import OptionError
from asyncpipe.ops.autograd.checkpoint import is_recomputing

__all__ = [
    "DeferredBatchNorm",
    "DeferredBatchNorm1d",
    "DeferredBatchNorm2d",
    "DeferredBatchNorm3d",
    "convert_deferred_batch_norm",
    "deferred_layers",
]


@dataclass(frozen=True, slots=True, eq=False)
class _Moments:
    """Values per channel, their mean, and the sum of their squared deviations from it; without a graph."""

    count: int
    mean: Tensor
    deviations: Tensor

    @classmethod
    def of(cls, batch: Tensor) -> _Moments:
        """Those of ``batch``, whose channels are dimension 1, in float32 or wider."""
        wide = batch.detach().to(torch.promote_types(batch.dtype, torch.float32))
        variance, mean = torch.var_mean(wide, [0, *range(2, batch.dim())], correction=0)
        count = batch.numel() // batch.size(1)
        return cls(count, mean, variance * count)

    def merged(self, other: _Moments) -> _Moments:
        """Those of both sets of values, without the cancellation that sums of squares suffer from.

        T. F. Chan, G. H. Golub and R. J. LeVeque, Updating formulae and a pairwise algorithm for computing sample
        variances, Stanford STAN-CS-79-773 (1979).
        """
        count = self.count + other.count
        distance = other.mean - self.mean
        between = distance.square() * (self.count * other.count / count)
        return _Moments(
            count, self.mean + distance * (other.count / count), self.deviations + other.deviations + between
        )


class DeferredBatchNorm(_BatchNorm):
    """A batch norm that gathers the statistics of micro-batches and updates its running ones when told to.

    Base of ``DeferredBatchNorm1d``, ``2d`` and ``3d``, each of which is also a ``BatchNorm1d``, ``2d`` or ``3d``
    with its arguments, state-dict keys and, in evaluation or with ``track_running_stats=False``, its behaviour.

    In training, ``forward`` runs on the thread and stream of the layer's device, once for each micro-batch; what
    a recomputation runs again is not counted again. ``commit`` and ``discard`` are for the caller of the step
    afterwards, on streams that are ordered behind the device's. Nothing here locks. A layer that is called twice
    in one model gets one update from all of its calls, where a bare layer makes one each.

    What is gathered is no buffer: it is in no state dict, but copies and pickles of the layer have it.
    """

    _gathered: _Moments | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name, which callers may use
        """``input`` normalised: (samples, channels, …); in training with its own statistics, which are gathered.

        Raises ``ValueError`` as the bare layer does, for a wrong number of dimensions and for a micro-batch with
        only one value per channel. It is not gathered then.
        """
        if not (self.training and self.track_running_stats):
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        output = functional.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)
        if not is_recomputing() and input.numel():
            moments = _Moments.of(input)
            self._gathered = moments if self._gathered is None else self._gathered.merged(moments)
        return output

    def commit(self) -> None:
        """Update the running statistics as the bare layer would for all micro-batches at once; gather anew.

        The variance is the unbiased one, over all values of the mini-batch. Does nothing if nothing was gathered.
        """
        gathered, self._gathered = self._gathered, None
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
                # In the wide type: a product in half precision would round twice.
                running.copy_(weight * new + (1 - weight) * running.to(new.dtype))

    def discard(self) -> None:
        """Forget what was gathered since the last commit."""
        self._gathered = None

    def _count_update(self, like: Tensor) -> float | Tensor:
        """Count one update; the weight of the new statistics in it, which no host waits for."""
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
    """``module`` with every ``BatchNorm1d``, ``2d`` and ``3d`` in it deferred; the deferred one if it is one itself.

    Layers are replaced in their parents. A new layer shares all state with the one that it replaces (parameters,
    buffers, hooks, the very objects), so optimizers stay valid and the state dict has the same keys. A layer that
    is used in several places stays one. Layers that track no running statistics, and deferred ones, are left.

    Raises ``OptionError``, with nothing replaced, for one that does track them and is a ``SyncBatchNorm``, a lazy
    batch norm that has not run yet, or another subclass of the three: what its own code does would be lost.
    """
    for path, layer in module.named_modules():
        _check_layer(path, layer)
    converted: dict[nn.Module, nn.Module] = {}
    if _is_convertible(module):
        return _deferred(module, converted)
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if _is_convertible(layer):
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, _deferred(layer, converted))
    return module


def deferred_layers(module: nn.Module) -> list[DeferredBatchNorm]:
    """The deferred batch norms in ``module``, each once: those to ``commit`` or ``discard`` when a step is over."""
    return [layer for layer in module.modules() if isinstance(layer, DeferredBatchNorm)]


def _is_convertible(layer: nn.Module) -> bool:
    return type(layer) in _DEFERRED and bool(layer.track_running_stats)


def _deferred(layer: nn.Module, converted: dict[nn.Module, nn.Module]) -> nn.Module:
    if layer not in converted:
        kind = _DEFERRED[type(layer)]
        twin = kind.__new__(kind)
        # The dictionaries too, so that whoever still holds the bare layer, or a handle of a hook, sees the same.
        vars(twin).update(vars(layer))
        converted[layer] = twin
    return converted[layer]


def _check_layer(path: str, layer: nn.Module) -> None:
    if not isinstance(layer, _BatchNorm) or not layer.track_running_stats:
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
