"""Logical devices: what the caller lists, made sure to be there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asyncpipe.errors import DeviceError

__all__ = ["Device", "resolve_devices"]


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
    # Not device.index, which torch keeps in eight bits: cuda:256 would be cuda:0.
    number = str(entry).partition(":")[2]
    index = int(number) if number else torch.cuda.current_device() if count else 0
    if not 0 <= index < count:
        there = ", ".join(f"cuda:{k}" for k in range(count)) or "no CUDA device"
        raise DeviceError(f"{entry!r} is not there; this machine has {there}, and 'cpu:N' for any N")
    return torch.device("cuda", index)
