"""torch's former ``Pipe``: a sequence whose layers the caller has placed on devices, called with several arguments.

The devices of the layers determine the stages::

    children   Linear on cuda:0, ReLU, Linear on cuda:0 │ Linear on cuda:1, Dropout │ Linear on the CPU │ another
    stages     0, on cuda:0                             │ 1, on cuda:1              │ 2, on cpu:0       │ 3, on cpu:1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from asyncpipe.compat.module import PipelinedModule, check_sequential
from asyncpipe.errors import ArgumentTypeError, BatchError, DeviceError
from asyncpipe.ops.device.devices import resolve_devices
from asyncpipe.ops.model.sequential import PipeSequential
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


class Pipe(PipelinedModule):
    """A pipeline in place of ``module``: the same layers, output and gradients. Layers stay on their devices.

    ``module``: an ``nn.Sequential`` whose children have been placed, each on one device. Consecutive children on one
    CUDA device form a stage; each child on the CPU is a stage of its own, with a thread of its own. A child
    without parameters and buffers joins the stage before it (or after it, if it is the first), unless it is in
    ``WithDevice``. A child that is a plain ``nn.Sequential`` contributes its layers.
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
        stages = _stages(module)
        parts = [PipeSequential(*layers) for layers, _ in stages]
        self._arrange(parts, _numbered([place for _, place in stages]), deferred_batch_norm=deferred_batch_norm)

    def forward(self, *inputs: Any) -> LocalOutput:
        """The output for a mini-batch, in a ``LocalOutput``; ``inputs`` are the first layer's arguments.

        If a layer returns a tuple, its elements are the next layer's arguments. Tensors are cut along dimension 0;
        every micro-batch gets tensors in ``NoChunk`` and other values whole. Outputs are gathered again: tensors are
        concatenated, ``None`` stays, other values make a list with one entry per micro-batch.

        Raises ``TypeError`` without a tensor to cut, ``ValueError`` for a tensor that is not on the first stage's
        device or cannot be cut, and whatever a layer raises. An error in ``backward`` is the cause of a ``TaskError``.
        """
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
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


def _stages(module: nn.Sequential) -> list[tuple[list[nn.Module], str]]:
    """The layers and the device of each stage; the device is ``ANY_CPU`` if it has no number."""
    stages: list[tuple[list[nn.Module], str]] = []
    waiting: list[nn.Module] = []
    for name, child in module._modules.items():
        assert child is not None
        place = _place(name, child)
        layers = list(_layers(child))
        if not layers:
            continue
        if place is None:
            (stages[-1][0] if stages else waiting).extend(layers)
        elif stages and place == stages[-1][1] != ANY_CPU:
            stages[-1][0].extend(layers)
        else:
            stages.append(([*waiting, *layers], place))
            waiting = []
    return [*stages, (waiting, ANY_CPU)] if waiting else stages


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


def _layers(child: nn.Module) -> Iterator[nn.Module]:
    """The layers in ``child``: wrappers that only group or place layers are removed, but no subclasses of them."""
    if isinstance(child, WithDevice):
        yield from _layers(child.module)
    elif isinstance(child, nn.Sequential) and type(child) in (nn.Sequential, PipeSequential):
        yield from child
    else:
        yield child


def _numbered(places: list[str]) -> list[str]:
    """``places``, where CPU devices without a number get the first free ones."""
    free = (name for number in count() if (name := f"cpu:{number}") not in places)
    return [next(free) if place == ANY_CPU else place for place in places]
