"""torch's former ``Pipe``: a sequence whose layers the caller has placed on devices, called with several arguments.

The devices of the layers determine the stages. Partitions, and with them the names in a state dict, are torch's::

    children   Linear on cuda:0, ReLU, Linear on cuda:0 │ Linear on cuda:1, Dropout │ Linear on the CPU │ another
    partition  0                 1     2                │ 3                 4       │ 5                 │ 6
    stages     0, on cuda:0                             │ 1, on cuda:1              │ 2, on cpu:0       │ 3, on cpu:1
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import nn

from asyncpipe.compat.module import PipelinedModule, check_sequential
from asyncpipe.errors import ArgumentTypeError, BatchError, DeviceError, OptionError
from asyncpipe.ops.device.devices import resolve_devices
from asyncpipe.ops.model.microbatch import NoChunk
from asyncpipe.ops.model.nested import tensors_of
from asyncpipe.ops.model.sequential import PipeSequential, check_unhooked
from asyncpipe.ops.model.skip_layout import verify_skippables

__all__ = ["LocalOutput", "Pipe", "WithDevice"]

ANY_CPU = "cpu"
"""Stands for a CPU device of the stage's own, whose number is chosen later."""


class WithDevice(nn.Module):
    """A child for ``Pipe`` that is placed on ``device``, wherever it is now. It otherwise behaves as ``module``.

    Consecutive children with one numbered device, such as ``"cpu:1"``, form a stage.
    """

    def __init__(self, module: nn.Module, device: str | torch.device) -> None:
        """Raises ``DeviceError`` for a device that does not exist."""
        super().__init__()
        resolve_devices([device])
        self._module = module
        self._device = torch.device(device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of ``module``."""
        return self._module(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The wrapped child."""
        return self._module

    @property
    def device(self) -> torch.device:
        """The device that it is placed on."""
        return self._device


@dataclass(frozen=True, slots=True, eq=False)
class LocalOutput:
    """What ``Pipe`` returns in place of torch's reference to a remote value. The value is local."""

    value: Any

    def local_value(self) -> Any:
        """The output."""
        return self.value

    def to_here(self) -> Any:
        """The output."""
        return self.value

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """``backward`` of the output, a tensor with one element. There is no distributed autograd, and -1 says so."""
        if dist_autograd_ctx_id != -1:
            raise OptionError(
                f"dist_autograd_ctx_id must be -1 for an output of this process, got {dist_autograd_ctx_id}"
            )
        self.value.backward(retain_graph=retain_graph)


class Pipe(PipelinedModule):
    """A pipeline in place of ``module``: the same layers, output and gradients. Layers stay on their devices.

    ``module``: an ``nn.Sequential`` whose children have been placed, each on one device. Consecutive children on one
    CUDA device form a stage; each child on the CPU is a stage of its own, with a thread of its own. A child
    without parameters and buffers joins the stage before it (or after it, if it is the first), unless it is in
    ``WithDevice``; it is a partition of its own all the same. A child that is a plain ``nn.Sequential`` contributes its
    layers.
    ``chunks``, ``checkpoint``, ``deferred_batch_norm``: as for ``asyncpipe.compat.torchgpipe.GPipe``.

    ``torch.distributed`` need not be initialised. Raises ``TypeError`` for another type of module, for ``chunks`` that
    is not a number and for skips that do not match, ``ValueError`` for other values and a child on several devices.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__(chunks, checkpoint)
        verify_skippables(check_sequential(module))
        partitions = _partitions(module)
        stages, places = _stages(partition.place for partition in partitions)
        parts = [_PipePartition(*partition.layers) for partition in partitions]
        self._arrange(parts, stages, _numbered(places), deferred_batch_norm=deferred_batch_norm)

    def forward(self, *inputs: Any) -> LocalOutput:
        """The output for a mini-batch, in a ``LocalOutput``; ``inputs`` are the first layer's arguments.

        If a layer returns a tuple, its elements are the next layer's arguments; those of a list are if a partition
        returns it, and an output that is a list comes as a tuple. Tensors are cut along dimension 0;
        every micro-batch gets tensors in ``NoChunk`` and other values whole. Outputs are gathered again: tensors are
        concatenated, ``None`` stays, other values make a list with one entry per micro-batch.

        Raises ``TypeError`` without a tensor to cut, ``ValueError`` for a tensor that is not on the first stage's
        device or cannot be cut, and whatever a layer raises. An error in ``backward`` is the cause of a ``TaskError``.
        """
        tensors = tensors_of(inputs, wraps=(NoChunk,))
        if not tensors:
            kinds = ", ".join(type(value).__name__ for value in inputs) or "nothing"
            raise ArgumentTypeError(f"the inputs hold no tensor to cut into micro-batches, got {kinds}")
        if not len(self.partitions):
            return LocalOutput(inputs[0] if len(inputs) == 1 else inputs)
        for tensor in tensors:
            if tensor.device != self.devices[0]:
                raise BatchError(
                    f"the inputs must be on {self.devices[0]}, the first stage's, got one on {tensor.device}"
                )
        return LocalOutput(self._run(*inputs))


class _PipePartition(PipeSequential):
    """A partition of ``Pipe``. What it returns as a list is a tuple, as for torch: arguments of the next partition."""

    def forward(self, *args: Any) -> Any:
        output = super().forward(*args)
        return tuple(output) if isinstance(output, list) else output


@dataclass(frozen=True, slots=True)
class _Partition:
    layers: list[nn.Module]
    device: torch.device
    """Where torch's ``Pipe`` would place it."""
    place: str | None
    """The device here; ``ANY_CPU`` if it has no number, ``None`` for that of its neighbour."""


def _partitions(module: nn.Sequential) -> list[_Partition]:
    """torch's partitions: consecutive children on one CUDA device, and each child on the CPU or without parameters."""
    partitions: list[_Partition] = []
    for name, child in module._modules.items():
        assert child is not None
        layers = list(_layers(name, child))
        place = _place(name, child) if layers else None
        device = child.device if isinstance(child, WithDevice) else _device(child)
        if partitions and device == partitions[-1].device and device.type != "cpu":
            partitions[-1].layers.extend(layers)
        else:
            partitions.append(_Partition(layers, device, place))
    return partitions if any(partition.layers for partition in partitions) else []


def _device(child: nn.Module) -> torch.device:
    return next((parameter.device for parameter in child.parameters()), torch.device("cpu"))


def _stages(places: Iterable[str | None]) -> tuple[list[int], list[str]]:
    """The stage of each partition, from their places, and the place of each stage."""
    stages: list[int] = []
    found: list[str] = []
    for place in places:
        if place is not None and not (found and place == found[-1] != ANY_CPU):
            found.append(place)
        stages.append(max(len(found) - 1, 0))
    return stages, found or [ANY_CPU]


def _place(name: str, child: nn.Module) -> str | None:
    """The device of ``child``, or ``None`` if it has neither parameters nor buffers."""
    if isinstance(child, WithDevice):
        physical = resolve_devices([child.device])[0].physical
        return str(physical) if physical.type == "cuda" else str(child.device)
    devices = {tensor.device for tensor in (list(child.parameters()) or child.buffers())}
    if len(devices) > 1:
        listed = ", ".join(sorted(map(str, devices)))
        raise DeviceError(
            f"child {name} ({type(child).__name__}) is spread over {listed}; move it to one device with .to(), or "
            "make a child of each of its parts"
        )
    return str(devices.pop()) if devices else None


def _layers(name: str, child: nn.Module) -> Iterator[nn.Module]:
    """The layers in ``child``: wrappers that only group or place layers are removed, but no subclasses of them."""
    if isinstance(child, WithDevice):
        yield from _layers(name, child.module)
    elif isinstance(child, nn.Sequential) and type(child) in (nn.Sequential, PipeSequential, _PipePartition):
        check_unhooked(child, f"child {name}")
        yield from child
    else:
        yield child


def _numbered(places: list[str]) -> list[str]:
    """``places``, where CPU devices without a number get the first free ones."""
    free = (name for number in count() if (name := f"cpu:{number}") not in places)
    return [next(free) if place == ANY_CPU else place for place in places]
