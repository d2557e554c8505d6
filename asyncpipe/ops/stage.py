"""From a model and a list of devices to placed stages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from asyncpipe.core.balance import check_balance, even_balance
from asyncpipe.errors import BalanceError, DeviceError, OptionError, SharedParameterError

__all__ = ["Device", "Stage", "as_sequential", "place", "resolve_devices", "split"]


@dataclass(frozen=True, slots=True)
class Device:
    """A logical device: its own thread and streams on a physical device, which others may share."""

    name: str
    """As the caller wrote it; the second of the same name gets ``#1``, and so on."""
    physical: torch.device

    @property
    def is_cuda(self) -> bool:
        """Whether work on it is asynchronous."""
        return self.physical.type == "cuda"


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """One consecutive part of the model on its logical device."""

    index: int
    module: nn.Module
    device: Device
    copies_input: bool
    """Whether the module may overwrite its input in place, which others still read."""

    def __call__(self, value: Any) -> Any:
        return self.module(value)


def resolve_devices(devices: Sequence[str | torch.device]) -> list[Device]:
    """Logical devices, one an entry: ``cpu``, ``cpu:N`` (any N) and ``cuda:N`` (those present; may repeat).

    Raises ``DeviceError`` for an empty list, an unknown kind of device, or one that is not there.
    """
    if isinstance(devices, str | torch.device) or not devices:
        raise DeviceError(f"devices must be a list such as ['cpu:0', 'cpu:1'], got {devices!r}")
    resolved: list[Device] = []
    for entry in devices:
        physical = _physical(entry)
        text = str(entry)
        repeats = sum(device.name.partition("#")[0] == text for device in resolved)
        resolved.append(Device(f"{text}#{repeats}" if repeats else text, physical))
    return resolved


def _physical(entry: str | torch.device) -> torch.device:
    try:
        device = torch.device(entry)
    except (RuntimeError, TypeError):
        raise DeviceError(f"{entry!r} is no device; asyncpipe knows 'cpu:N' and 'cuda:N'") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise DeviceError(f"{entry!r} is a device of kind {device.type!r}; asyncpipe knows 'cpu:N' and 'cuda:N'")
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None and count else device.index or 0
    if index >= count:
        there = ", ".join(f"cuda:{k}" for k in range(count)) or "no CUDA device"
        raise DeviceError(f"{entry!r} is not there; this machine has {there}, and 'cpu:N' for any N")
    return torch.device("cuda", index)


def as_sequential(model: nn.Module | Sequence[nn.Module]) -> nn.Sequential:
    """The model as a sequence of layers: an ``nn.Sequential`` as it is, a list of modules wrapped in one."""
    if isinstance(model, nn.Sequential):
        sequence = model
    elif isinstance(model, Sequence) and all(isinstance(layer, nn.Module) for layer in model):
        sequence = nn.Sequential(*model)
    else:
        raise OptionError(
            f"model must be an nn.Sequential or a list of modules, got {type(model).__name__}; wrap its parts, in the "
            "order in which they are called, in an nn.Sequential"
        )
    if not len(sequence):
        raise OptionError("model has no layers; give at least one a stage")
    return sequence


def split(model: nn.Sequential, balance: str | Sequence[int], stages: int) -> list[nn.Sequential]:
    """``stages`` consecutive parts of ``model``, with the names of its layers.

    ``balance`` gives the number of layers of each, or is ``"auto"``: parameters spread as evenly as can be.
    Raises ``BalanceError``.
    """
    layers = list(model._modules.items())  # named_children() leaves out a layer that is there twice.
    if isinstance(balance, str):
        if balance != "auto":
            raise BalanceError(f"balance must be 'auto' or a list of integers, got {balance!r}")
        sizes = even_balance([1 + sum(p.numel() for p in layer.parameters()) for layer in model], stages)
    else:
        sizes = check_balance(balance, len(layers))
        if len(sizes) != stages:
            raise BalanceError(f"balance {sizes} has {len(sizes)} entries for {stages} stages; give one a stage")
    ends = list(accumulate(sizes))
    return [nn.Sequential(OrderedDict(layers[end - size : end])) for size, end in zip(sizes, ends, strict=True)]


def place(parts: Sequence[nn.Module], placement: Sequence[int], devices: Sequence[Device]) -> list[Stage]:
    """Move each part to its device (in place: parameters stay the same objects) and call it a stage.

    Raises ``SharedParameterError``, before anything moves, if parts on different devices share a parameter.
    """
    owners: dict[int, int] = {}
    for index, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            other = owners.setdefault(id(parameter), index)
            if placement[other] != placement[index]:
                raise SharedParameterError(
                    f"parameter {name!r} is used by stage {other} and stage {index} on different devices; choose a "
                    "balance that puts both layers on one device, or give each its own parameter"
                )
    return [
        Stage(index, part.to(devices[device].physical), devices[device], _has_inplace(part))
        for index, (part, device) in enumerate(zip(parts, placement, strict=True))
    ]


def _has_inplace(part: nn.Module) -> bool:
    return any(getattr(module, "inplace", False) for module in part.modules())
