"""What the controller and a worker say to each other of a pipeline, besides its steps (``runtime/part_messages.py``).

What is a plain call of a method there is a ``Call``.

Models, inputs, results and states are bytes or buffers here (``ops/device/wire.py``), made where their errors can be
raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncpipe.core.policies.share import Share
from asyncpipe.ops.device.process_settings import ProcessSettings
from asyncpipe.runtime.workers.launcher import Address

__all__ = [
    "Flags",
    "GroupValue",
    "LoadPipeline",
    "OpenedDoor",
    "PartResult",
    "Pieces",
    "PlacedDevice",
    "Scalars",
    "StagePlace",
]


@dataclass(frozen=True, slots=True)
class LoadPipeline:
    """Controller: become the home of some stages. The answer is ``None``."""

    pipeline: int
    """A number of its own."""
    model: Sequence[Any] = field(repr=False)
    """Buffers of the whole model, with the tensors of the own stages, or of a ``StageFactory``."""
    is_factory: bool
    trains: Sequence[bool] = field(repr=False)
    """Of each parameter, in the order of ``parameters()``: whether it required a gradient when the pipeline was made,
    and so belongs to an optimizer. A factory's stages say it themselves."""
    options: bytes = field(repr=False)
    count: int
    """Of the pipeline's devices."""
    devices: Mapping[int, PlacedDevice]
    """By position among them: those of this worker, and of the workers that it has edges with."""
    names: Mapping[int, str]
    """Of these workers."""
    me: int
    pairs: Sequence[tuple[int, int]]
    """Its edges, in an order that is one for all workers."""
    addresses: Mapping[int, Address]
    """Where those are reached that it sends to, while edges are made."""
    transports: Mapping[tuple[int, int], str]
    """How tensors travel on them."""
    is_far: bool
    """Whether some of the pipeline's edges are between machines, whose clocks are different."""
    settings: ProcessSettings
    share: Share
    schedule: int
    """The number of the schedule among the options."""
    pool: bytes = field(repr=False)
    """The options of the worker's pool, which its first pipeline makes."""
    place: StagePlace | None = None
    """Where stages are spread over groups of workers."""


class StagePlace(NamedTuple):
    """Where a worker is in the group of workers that has its stages."""

    members: Sequence[str]
    """Their names."""
    rank: int
    address: str | None
    """Where the others reach it; ``None`` where the controller does."""


class GroupValue(NamedTuple):
    """Worker: tell the other ``members`` of my group of a pipeline, which is made."""

    pipeline: int
    members: Sequence[str]
    key: str
    value: bytes


class PlacedDevice(NamedTuple):
    """A device of a pipeline."""

    name: str
    physical: str
    """As its worker calls it."""
    worker: int


class OpenedDoor(NamedTuple):
    """Where to come."""

    local: str | None
    remote: tuple[str, int] | None


class Flags(NamedTuple):
    """What a caller may change in the model between two steps, besides its values."""

    training: tuple[bool, ...]
    """Of each module, in the order of ``modules()``."""
    requires_grad: tuple[bool, ...]
    """Of each parameter, in the order of ``parameters()``."""


class Pieces(NamedTuple):
    """Values of all micro-batches. Those that lie behind each other in memory go as one: each more takes its time."""

    whole: Tensor | None
    """Without dimensions, if they are tensors that do."""
    values: Sequence[Any]
    """They, or the shapes of the tensors."""

    @classmethod
    def of(cls, values: Sequence[Any]) -> Pieces:
        """``values`` for another process."""
        if len(values) < 2 or not all(map(_is_plain, values)):
            return cls(None, values)
        first: Tensor = values[0]
        storage, start = first.untyped_storage().data_ptr(), first.storage_offset()
        end = start
        for value in values:
            if value.dtype != first.dtype or value.storage_offset() != end:
                return cls(None, values)
            if value.untyped_storage().data_ptr() != storage:
                return cls(None, values)
            end += value.numel()
        return cls(first.detach().as_strided((end - start,), (1,)), [tuple(value.shape) for value in values])

    def unpacked(self) -> list[Any]:
        """The values. Tensors share memory, as micro-batches that the caller has cut do, and are no views."""
        if self.whole is None:
            return list(self.values)
        storage, start, found = self.whole.untyped_storage(), self.whole.storage_offset(), []
        for shape in self.values:
            tensor = torch.empty(0, dtype=self.whole.dtype).set_(storage, start, shape)  # type: ignore[call-overload]
            start += tensor.numel()
            found.append(tensor)
        return found


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor that is nothing but its elements."""
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and value.is_cpu
        and value.is_contiguous()
        and value.numel() > 0
        and not (value.is_quantized or value.is_conj() or value.is_neg() or (value.requires_grad and value.is_leaf))
    )


class Scalars(NamedTuple):
    """One-number tensors by micro-batch, as one tensor where they are alike: each one more takes as long to send."""

    keys: Sequence[int]
    values: Tensor | Sequence[Tensor]

    @classmethod
    def of(cls, tensors: Mapping[int, Tensor]) -> Scalars:
        values = [tensor.detach() for tensor in tensors.values()]
        alike = len({(value.dtype, value.shape, value.device) for value in values}) == 1
        return cls(list(tensors), torch.stack(values) if alike else values)

    def tensors(self) -> dict[int, Tensor]:
        """Them, by micro-batch."""
        return dict(zip(self.keys, self.values, strict=True))


class PartResult(NamedTuple):
    """What a worker's part has left for the caller: losses and outputs in the worker of the last stage."""

    losses: Scalars
    counts: Scalars
    gradient_norms: Scalars
    """By stage, and under ``WHOLE_STEP`` of all."""
    outputs: Mapping[int, Any]
    """By micro-batch."""
    learning_rate: float | None = None
    """What the first stage's scheduler had set."""
