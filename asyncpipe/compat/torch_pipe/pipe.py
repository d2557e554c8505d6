"""torch's former ``Pipe``: a sequence whose layers the caller has placed, called with several arguments.

Stages follow from where the layers are::

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
"""A CPU device of the stage's own, which gets a number later."""


class WithDevice(nn.Module):
    """A child for ``Pipe`` that goes to ``device``, whatever device it is on; else the same as ``module``.

    Consecutive children with one numbered device, such as ``"cpu:1"``, form a stage.
    """

    def __init__(self, module: nn.Module, device: str | torch.device) -> None:
        """Raises ``DeviceError`` for a device that is not there."""
        super().__init__()
        resolve_devices([device])
        self._module = module
        self._device = torch.device(device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What ``module`` returns."""
        return self._module(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The child itself."""
        return self._module

    @property
    def device(self) -> torch.device:
        """Where it goes."""
        return self._device


@dataclass(frozen=True, slots=True, eq=False)
class LocalOutput:
    """What ``Pipe`` returns in place of a reference to a remote value: the value is here."""

    value: Any

    def local_value(self) -> Any:
        """The output."""
        return self.value

    def to_here(self) -> Any:
        """The output."""
        return self.value


class Pipe(PipelinedModule):
    """A pipeline in place of ``module``: the same layers, output and gradients, with each layer where it is.

    ``module``: an ``nn.Sequential`` whose children have been placed, each on one device. Consecutive children on one
    CUDA device form a stage; each child on the CPU is a stage of its own, with a thread of its own. A child
    without parameters and buffers goes to the stage before it (or after it, if it is the first), unless it is in
    ``WithDevice``. The layers of a child that is a plain ``nn.Sequential`` count as the children's own.
    ``chunks``, ``checkpoint``, ``deferred_batch_norm``: as for ``asyncpipe.compat.torchgpipe.GPipe``.

    Nothing of ``torch.distributed`` has to be initialised. Raises ``TypeError`` for another module, ``chunks`` that
    are no number, and skips that do not match, ``ValueError`` for other values and for a child on several devices.
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

        A tuple that a layer returns is the next one's arguments. Tensors have the batch as dimension 0 and are cut,
        but those in ``NoChunk``; every micro-batch gets everything else whole. Outputs are gathered again: tensors
        concatenated, ``None`` as it is, other values in a list with one for each micro-batch.

        Raises ``TypeError`` without a tensor to cut, ``ValueError`` for a tensor on another device than the first
        stage, or for tensors that cannot be cut, and whatever a layer raises; from ``backward`` that is the cause
        of a ``TaskError``.
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
    """The layers of each stage, and its device, ``ANY_CPU`` where no number is given."""
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
    """The device of ``child``, or ``None`` if it has nothing that could be on one."""
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
    """``child`` without what only groups or places it; a subclass may do more than that."""
    if isinstance(child, WithDevice):
        yield from _layers(child.module)
    elif isinstance(child, nn.Sequential) and type(child) in (nn.Sequential, PipeSequential):
        yield from child
    else:
        yield child


def _numbered(places: list[str]) -> list[str]:
    """``places`` with the first free numbers for CPU devices that have none."""
    free = (name for number in count() if (name := f"cpu:{number}") not in places)
    return [next(free) if place == ANY_CPU else place for place in places]
