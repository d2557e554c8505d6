"""Measure what layers cost, in time or in memory, to balance stages by it.

The layers run in order in the calling thread, each as a stage of its own: cut off from the layer before, forward
and, where time is measured, backward. One layer at a time is copied and placed, so that memory is bounded by the
dearest layer and nothing of the model changes, whatever a layer does to itself or to its input::

    sample ─▶ cut ─▶ copy of layer 0 ─▶ cut ─▶ copy of layer 1 ─▶ cut ─▶ …      forward
                     copy of layer 0 ◀─ ones   copy of layer 1 ◀─ ones          backward, right after the forward
                            └──stash──▶ cut ──pop──▶┘
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from math import inf
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

from asyncpipe.core.checks import check_positive
from asyncpipe.core.predict.balance import even_balance
from asyncpipe.errors import BalanceError, BatchError, MicrobatchError, OptionError
from asyncpipe.ops.device.devices import resolve_devices
from asyncpipe.ops.model.microbatch import Arguments, NoChunk, Packet, cut
from asyncpipe.ops.model.skips import SkipKey, Skippable, SkipStore, use_skips

__all__ = ["balance_by_size", "balance_by_time", "layer_bytes", "layer_times"]

T = TypeVar("T")


def balance_by_time(
    stages: int,
    module: nn.Sequential,
    sample: Any,
    *,
    seconds: float = 1.0,
    device: str | torch.device = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> list[int]:
    """How many layers of ``module`` each of ``stages`` stages gets, so that they take about the same time.

    Arguments and errors are those of ``layer_times``, and ``BalanceError`` for fewer layers than stages.
    """
    _check_stages(module, stages)
    return even_balance(layer_times(module, sample, seconds=seconds, device=device, clock=clock), stages)


def balance_by_size(
    stages: int,
    module: nn.Sequential,
    sample: Any,
    *,
    microbatches: int = 1,
    parameter_scale: float = 2.0,
    batch_dim: int = 0,
    device: str | torch.device = "cpu",
) -> list[int]:
    """How many layers of ``module`` each of ``stages`` stages gets, so that they need about the same memory.

    Arguments and errors are those of ``layer_bytes``, and ``BalanceError`` for fewer layers than stages.
    """
    _check_stages(module, stages)
    costs = layer_bytes(
        module,
        sample,
        microbatches=microbatches,
        parameter_scale=parameter_scale,
        batch_dim=batch_dim,
        device=device,
    )
    return even_balance(costs, stages)


def layer_times(
    module: nn.Sequential,
    sample: Any,
    *,
    seconds: float = 1.0,
    device: str | torch.device = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds that each layer of ``module`` takes for a forward and a backward of ``sample``: the median of repeats.

    ``sample`` is what the model takes: a tensor, a nested value or ``Arguments``. All layers run once unmeasured,
    then again and again until ``seconds`` are over, at least once. They run on ``device``, whatever device the
    model is on, in the mode (training or evaluation) that they are in, with gradients for what has them in the
    whole model. On CUDA the device's own events are read and ``clock`` only tells when to stop.

    Parameters, gradients, buffers, modes, placement and torch's random generators are left as they are. Raises
    ``BalanceError`` if ``module`` is no ``nn.Sequential``, ``BatchError`` if ``sample`` holds no tensor,
    ``DeviceError`` for a device that is not there, ``OptionError`` for other ``seconds`` than finite ones, zero
    or more; and what a layer raises, with a note of which one.
    """
    _check_stages(module)
    if not 0 <= seconds < inf:
        raise OptionError(f"seconds must be a finite number, zero or more, got {seconds!r}")
    physical = resolve_devices([device])[0].physical
    measure = partial(_seconds, stopwatch=_stopwatch(physical, clock))
    repeats: list[list[float]] = []
    with _left_as_it_was(module, physical):
        value = _placed(sample, physical)
        _run_layers(module, value, physical, measure)
        begun = clock()
        while not repeats or clock() - begun < seconds:
            repeats.append(_run_layers(module, value, physical, measure))
    return [median(column) for column in zip(*repeats, strict=True)]


def layer_bytes(
    module: nn.Sequential,
    sample: Any,
    *,
    microbatches: int = 1,
    parameter_scale: float = 2.0,
    batch_dim: int = 0,
    device: str | torch.device = "cpu",
) -> list[int]:
    """Bytes that each layer of ``module`` needs in training, for one micro-batch of the mini-batch ``sample``.

    They are the memory of what autograd saves for the backward and of the output (what the layer stashes is
    output too), each storage once, plus ``parameter_scale`` times the parameters: 2 for parameter and gradient, 4
    with AdamW's two averages. Frozen parameters count once. Neither parameters nor buffers count as saved. An
    input that the backward needs counts as saved by this layer and as output of the one before, as it would if
    there were a border between the two. What a layer hides from autograd's hooks is not seen, such as the inputs
    that ``torch.utils.checkpoint`` keeps.

    ``sample`` is cut along ``batch_dim`` as the pipeline does it, ``NoChunk`` included, and the first micro-batch,
    which none exceeds, is measured on ``device``. Nothing changes and errors are as with ``layer_times``, and
    ``MicrobatchError`` and ``OptionError`` for ``microbatches`` and a ``parameter_scale`` that are out of range,
    ``BatchError`` if ``sample`` cannot be cut.
    """
    _check_stages(module)
    if not 0 <= parameter_scale < inf:
        raise OptionError(f"parameter_scale must be a finite number, zero or more, got {parameter_scale!r}")
    physical = resolve_devices([device])[0].physical
    check_positive("microbatches", microbatches, MicrobatchError)
    first = cut(sample, microbatches, dim=batch_dim, name="the sample").pieces[0]
    measure = partial(_bytes, parameter_scale=parameter_scale)
    with _left_as_it_was(module, physical):
        return _run_layers(module, _placed(first, physical), physical, measure)


def _check_stages(module: nn.Sequential, stages: int | None = None) -> None:
    if not isinstance(module, nn.Sequential):
        raise BalanceError(
            f"layers are measured one after the other, in an nn.Sequential; got {type(module).__name__}; make one of "
            "its layers, or give the balance as a list"
        )
    if stages is not None:
        # Now rather than after the measurement: it raises if there are too few layers.
        even_balance([1] * len(module), stages)


def _placed(sample: Any, device: torch.device) -> Any:
    """``sample`` on ``device``, off any graph but with the same wish for gradients."""
    if not Packet(bare := tree_map(_bare, sample)).tensors:
        raise BatchError(f"the sample holds no tensor, got {type(sample).__name__}; give what the model takes")
    return _cut_off(bare, device)


def _bare(leaf: Any) -> Any:
    return leaf.tensor if isinstance(leaf, NoChunk) else leaf


def _cut_off(value: Any, device: torch.device | None = None) -> Any:
    """``value`` with leaves for tensors, which require a gradient where the tensors do."""
    packet = Packet(value)
    return packet.rebuild(
        tensor.detach().to(device or tensor.device).requires_grad_(tensor.requires_grad) for tensor in packet.tensors
    )


@contextmanager
def _left_as_it_was(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Whatever the caller's modes, gradients are on inside; generators and gradients are restored afterwards."""
    cuda = device.type == "cuda"
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng([device.index] if cuda else []))
        if cuda:
            stack.enter_context(torch.cuda.device(device))
        # Layers are copies, but a function that one of them holds on to may use the model's own parameters.
        for parameter in module.parameters():
            stack.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        yield


# Layers


class _CutOffSkips(SkipStore):
    """Skips that are cut off from the layer that stashed them: its backward is over when another one pops them."""

    def __init__(self) -> None:
        super().__init__()
        self.stashed: list[Tensor] = []
        """By the layer that runs."""

    def stash(self, key: SkipKey, tensor: Tensor | None) -> None:
        if tensor is not None:
            self.stashed.append(tensor)
        super().stash(key, _cut_off(tensor))

    def pop(self, key: SkipKey) -> Tensor | None:
        # Not the leaf itself, which could not be changed in place.
        tensor = super().pop(key)
        return None if tensor is None else tensor.clone()


class _MeasuredLayer:
    """A copy of one layer and what it is called with."""

    def __init__(self, layer: nn.Module, arguments: Arguments, device: torch.device, skips: _CutOffSkips) -> None:
        # A namespace is its identity: a copy of it would hide the skips from the other layers.
        parts = [part for part in layer.modules() if isinstance(part, Skippable)]
        namespaces = {id(space): space for part in parts for space in part.skip_namespaces.values()}
        self.module = deepcopy(layer, namespaces).to(device)
        # Clones, for operations in place: of what other layers read, and of leaves.
        packet = Packet(arguments)
        self._arguments = packet.rebuild([tensor.clone() for tensor in packet.tensors])
        self._skips = skips
        self.output: Any = None

    def forward(self) -> None:
        """Run it, which gives it its output."""
        self.output = self.module(*self._arguments.args, **self._arguments.kwargs)

    def made(self) -> list[Tensor]:
        """All tensors that it has made for others: its output's and those that it stashed."""
        return Packet(self.output).tensors + self._skips.stashed


def _run_layers(
    module: nn.Sequential, value: Any, device: torch.device, measure: Callable[[_MeasuredLayer], T]
) -> list[T]:
    """What ``measure`` says of each layer, called with it in order; it must run the layer's forward."""
    measured: list[T] = []
    skips = _CutOffSkips()
    with use_skips(skips):
        for index, part in enumerate(module):
            # Like nn.Sequential, but that the first layer takes whatever the model does.
            arguments = Arguments((value,), {}) if index else Arguments.wrap(value)
            try:
                layer = _MeasuredLayer(part, arguments, device, skips)
                measured.append(measure(layer))
            except Exception as error:
                error.add_note(f"raised by layer {index} ({type(part).__name__}) while it was measured")
                raise
            value = _cut_off(layer.output)
            # Its graph and its copy go before the next layer is copied.
            skips.stashed.clear()
            del layer, arguments
    return measured


# Measures


def _seconds(layer: _MeasuredLayer, stopwatch: Callable[[Callable[[], None]], float]) -> float:
    """How long the layer's forward and backward take."""
    forward = stopwatch(layer.forward)
    outputs = [tensor for tensor in layer.made() if tensor.requires_grad]
    gradients = [torch.ones_like(tensor) for tensor in outputs]
    if not outputs:
        return forward
    return forward + stopwatch(partial(torch.autograd.backward, outputs, gradients))


def _stopwatch(device: torch.device, clock: Callable[[], float]) -> Callable[[Callable[[], None]], float]:
    """A function that runs another one and returns the seconds that this took on ``device``."""

    def on_host(work: Callable[[], None]) -> float:
        begun = clock()
        work()
        return clock() - begun

    def on_cuda(work: Callable[[], None]) -> float:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        # The stream is idle here, but for what prepares this very work, so that nothing else is timed.
        begun.record()
        work()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) * 1e-3

    return on_cuda if device.type == "cuda" else on_host


def _bytes(layer: _MeasuredLayer, parameter_scale: float) -> int:
    """The memory that the layer needs from its forward to its backward, and with its parameters."""
    # Storages by address; kept alive, so that no address is given out twice.
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor.detach()

    with saved_tensors_hooks(keep, lambda kept: kept):
        layer.forward()
    for tensor in layer.made():
        keep(tensor)
    for tensor in (*layer.module.parameters(), *layer.module.buffers()):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    activations = sum(storage.nbytes() for storage in storages.values())
    return activations + round(sum(_parameter_bytes(p, parameter_scale) for p in layer.module.parameters()))


def _parameter_bytes(parameter: nn.Parameter, scale: float) -> float:
    # A frozen parameter has no gradient, and an optimizer keeps nothing for it.
    return parameter.numel() * parameter.element_size() * (scale if parameter.requires_grad else min(scale, 1.0))
