"""Measures the time or the memory that each layer needs, to balance stages by it.

The layers run in order on the calling thread, each as if it were a stage: its graph does not include the layer before;
its forward runs, and if time is measured also its backward. Only one layer at a time is copied to the device. So memory
is bounded by the largest layer, and the model does not change, whatever a layer does to itself or its input::

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

from asyncpipe.core.checks import check_positive
from asyncpipe.core.predict.balance import even_balance
from asyncpipe.errors import BalanceError, BatchError, MicrobatchError, OptionError
from asyncpipe.ops.device.devices import resolve_devices
from asyncpipe.ops.model.byte_recorder import LiveBytes, parameter_bytes
from asyncpipe.ops.model.microbatch import Arguments, Packet, cut, without_no_chunk
from asyncpipe.ops.model.sequential import PipeSequential
from asyncpipe.ops.model.skips import SkipKey, SkipStore, use_skips

__all__ = ["balance_by_size", "balance_by_time", "copied", "layer_bytes", "layer_times"]

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

    The other arguments are explained at ``layer_times``. Raises what that raises, and ``BalanceError`` for fewer layers
    than stages.
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

    The other arguments are explained at ``layer_bytes``. Raises what that raises, and ``BalanceError`` for fewer layers
    than stages.
    """
    _check_stages(module, stages)
    costs = layer_bytes(
        module, sample, microbatches=microbatches, parameter_scale=parameter_scale, batch_dim=batch_dim, device=device
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

    ``sample`` is what the model takes: a tensor, a nested value or ``Arguments``. All layers run once unmeasured, and
    then repeatedly, at least once, until ``seconds`` are over. They run on ``device``, whichever device the model is
    on, in the mode (training or evaluation) that they are in, and with gradients for the tensors that have them in the
    whole model. On an accelerator the times are those of the device's events, and ``clock`` only decides when to stop.

    Parameters, gradients, buffers, modes, placement and torch's random generators do not change. Raises
    ``BalanceError`` if ``module`` is not an ``nn.Sequential``, ``BatchError`` if ``sample`` holds no tensor,
    ``DeviceError`` for a device that is not present, ``OptionError`` if ``seconds`` is negative or not finite; and what
    a layer raises, with a note that names the layer.
    """
    _check_stages(module)
    if not 0 <= seconds < inf:
        raise OptionError(f"seconds must be a finite number, zero or more, got {seconds!r}")
    physical = resolve_devices([device])[0].physical
    measure = partial(_seconds, device=physical, clock=clock)
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

    This is the memory that is still in use when the forward is over: of what the backward needs, of what the layer has
    made and keeps elsewhere, and of the output (including what the layer stashes), each storage once, plus
    ``parameter_scale`` times the parameters: 2 for parameter and gradient, 4 with the two averages of AdamW.
    Frozen parameters count once. Neither parameters nor buffers count as saved. An input that the backward needs counts
    as saved by this layer and as output of the layer before, as if the two were in different stages. Memory that no
    operator of torch has made is not counted.

    ``sample`` is cut along ``batch_dim`` as by the pipeline, ``NoChunk`` included. The first micro-batch, which is
    never smaller than another, is measured on ``device``. Changes nothing, and raises what ``layer_times`` raises; also
    ``MicrobatchError`` or ``OptionError`` if ``microbatches`` or ``parameter_scale`` is out of range, and
    ``BatchError`` if ``sample`` cannot be cut.
    """
    _check_stages(module)
    if not 0 <= parameter_scale < inf:
        raise OptionError(f"parameter_scale must be a finite number, zero or more, got {parameter_scale!r}")
    physical = resolve_devices([device])[0].physical
    check_positive("microbatches", microbatches, MicrobatchError)
    first = cut(sample, microbatches, dim=batch_dim, name="the sample").with_samples("the sample").pieces[0]
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
        # Raises if there are too few layers, before the measurement instead of after it.
        even_balance([1] * len(module), stages)


def _placed(sample: Any, device: torch.device) -> Any:
    """``sample`` on ``device``, detached; its tensors require gradients as before."""
    if not Packet(bare := without_no_chunk(sample)).tensors:
        raise BatchError(f"the sample holds no tensor, got {type(sample).__name__}; give what the model takes")
    return _cut_off(bare, device)


def _cut_off(value: Any, device: torch.device | None = None) -> Any:
    """``value`` with its tensors detached; those that required a gradient still do."""
    packet = Packet(value)
    return packet.rebuild(
        tensor.detach().to(device or tensor.device).requires_grad_(tensor.requires_grad) for tensor in packet.tensors
    )


@contextmanager
def _left_as_it_was(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Enable gradients inside, whatever the caller's modes; afterwards restore generators and gradients."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if device.type == "cpu":
            stack.enter_context(torch.random.fork_rng([]))
        else:
            stack.enter_context(torch.random.fork_rng([device.index], device_type=device.type))
            stack.enter_context(torch.get_device_module(device).device(device))
        # Layers are copies, but a function that one of them refers to may use the model's own parameters.
        for parameter in module.parameters():
            stack.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        yield


# Layers


def copied(module: nn.Module) -> nn.Module:
    """A deep copy of ``module`` with parameters of its own.

    With gradients enabled, parameters of a copied TorchScript module would be computed from those of the original, and
    pass their gradients on to it; without, they require none.
    """
    with torch.no_grad():
        copy: nn.Module = deepcopy(module)
    every = [dict(each.named_parameters(remove_duplicate=False)) for each in (module, copy)]
    for name, parameter in every[0].items():
        every[1][name].requires_grad_(parameter.requires_grad)
    return copy


class _CutOffSkips(SkipStore):
    """Skips detached from the layer that stashed them, since its backward is over before another layer pops them."""

    def __init__(self) -> None:
        super().__init__()
        self.stashed: list[Tensor] = []
        """What the layer that runs has stashed."""

    def stash(self, key: SkipKey, tensor: Tensor | None) -> None:
        if tensor is not None:
            self.stashed.append(tensor)
        super().stash(key, _cut_off(tensor))

    def pop(self, key: SkipKey) -> Tensor | None:
        # A clone, since a leaf that requires a gradient cannot be changed in place.
        tensor = super().pop(key)
        return None if tensor is None else tensor.clone()


class _MeasuredLayer:
    """A copy of one layer, and the arguments of its call."""

    def __init__(self, layer: nn.Module, arguments: Arguments, device: torch.device, skips: _CutOffSkips) -> None:
        self.module = copied(layer).to(device)
        # Clones, which the layer may change in place: others read the originals, and leaves cannot be changed.
        packet = Packet(arguments)
        self.arguments = packet.rebuild([tensor.clone() for tensor in packet.tensors])
        """What ``forward`` gives the layer; gone afterwards."""
        self._skips = skips
        self.output: Any = None

    def forward(self) -> None:
        """Run the layer, once, and set ``output``."""
        args, kwargs = self.arguments
        del self.arguments
        self.output = self.module(*args, **kwargs)

    def sent(self) -> list[Tensor]:
        """All tensors that the layer passes to later ones: of its output and of what it stashed."""
        return Packet(self.output).tensors + self._skips.stashed


def _run_layers(
    module: nn.Sequential, value: Any, device: torch.device, measure: Callable[[_MeasuredLayer], T]
) -> list[T]:
    """The result of ``measure`` for each layer, in order. ``measure`` must run the layer's forward."""
    measured: list[T] = []
    skips = _CutOffSkips()
    with use_skips(skips):
        for index, part in enumerate(module):
            # As in the sequence itself, but the first layer may always take several arguments.
            if index:
                unpacks = isinstance(module, PipeSequential) and isinstance(value, tuple)
                arguments = Arguments(value if unpacks else (value,), {})
            else:
                arguments = Arguments.wrap(value)
            try:
                layer = _MeasuredLayer(part, arguments, device, skips)
                measured.append(measure(layer))
            except Exception as error:
                error.add_note(f"raised by layer {index} ({type(part).__name__}) while it was measured")
                raise
            value = _cut_off(layer.output)
            # Free its graph and its copy before the next layer is copied.
            skips.stashed.clear()
            del layer, arguments
    return measured


# Measures


def _seconds(layer: _MeasuredLayer, device: torch.device, clock: Callable[[], float]) -> float:
    """Seconds of the layer's forward and backward on ``device``."""
    forward = _timed(layer.forward, device, clock)
    outputs = [tensor for tensor in layer.sent() if tensor.requires_grad]
    gradients = [torch.ones_like(tensor) for tensor in outputs]
    if not outputs:
        return forward
    return forward + _timed(partial(torch.autograd.backward, outputs, gradients), device, clock)


def _timed(work: Callable[[], None], device: torch.device, clock: Callable[[], float]) -> float:
    """Run ``work``; the seconds that it took on ``device``."""
    if device.type == "cpu":
        begun = clock()
        work()
        return clock() - begun
    first, last = (torch.get_device_module(device).Event(enable_timing=True) for _ in range(2))
    # The stream has nothing else queued than what prepares ``work``, so only ``work`` is timed.
    first.record()
    work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3


def _bytes(layer: _MeasuredLayer, parameter_scale: float) -> int:
    """The bytes that the layer needs between its forward and its backward, and for its parameters."""
    memory = LiveBytes((*layer.module.parameters(), *layer.module.buffers()))
    memory.note(Packet(layer.arguments).tensors)
    with memory:
        layer.forward()
    memory.note(layer.sent())
    total, trained = parameter_bytes(layer.module)
    # A frozen parameter has no gradient, and the optimizer keeps nothing for it.
    return memory.live + round(trained * parameter_scale + (total - trained) * min(parameter_scale, 1.0))
