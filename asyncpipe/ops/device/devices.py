"""Logical devices, from the names that the caller lists; each is checked to be present."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asyncpipe.core.hosts import DeviceName
from asyncpipe.errors import DeviceError

__all__ = ["ACCELERATORS", "Device", "await_event", "make_current", "resolve_devices"]

ACCELERATORS = ("cuda",)
"""The types of devices besides the CPU. Work on them is asynchronous: it is queued on a stream."""

_KNOWN = " and ".join(f"'{kind}:N'" for kind in ("cpu", *ACCELERATORS))


@dataclass(frozen=True, slots=True)
class Device:
    """A logical device: its own thread and streams on a physical device, which others may share."""

    name: str
    """As the caller wrote it, maybe with its host; the second of the same name gets ``#1``, and so on."""
    physical: torch.device
    is_elsewhere: bool = False
    """Whether another worker has it. What is on it is only known by its shape here (``ops/model/shipping.py``)."""

    @property
    def host(self) -> str:
        """The host that its name has; empty if it has none."""
        return DeviceName.parse(self.name).host

    @property
    def is_accelerator(self) -> bool:
        """Whether work on it is asynchronous."""
        return self.physical.type in ACCELERATORS

    def elsewhere(self) -> Device:
        """This device, as a worker sees it that does not have it."""
        return Device(self.name, torch.device("meta"), is_elsewhere=True)


def make_current(device: torch.device) -> None:
    """Make an accelerator the calling thread's device. Each thread of ours that calls CUDA does that before.

    A thread's device is GPU 0 until it is set, and CUDA makes a context there, of some hundred MiB, for calls that
    concern another GPU: a wait for an event, or the end of a block with a stream. (Threads of the autograd engine set
    theirs, and ``torch.cuda.device`` leaves no context behind.)
    """
    torch.get_device_module(device).set_device(device)


def await_event(event: torch.Event) -> None:
    """Block until ``event`` has happened, on a thread whose device is another one, and stays that."""
    with torch.get_device_module(event.device).device(event.device):
        event.synchronize()


def resolve_devices(devices: Sequence[str | torch.device], *, on_hosts: bool = False) -> list[Device]:
    """Logical devices, one an entry: ``cpu``, ``cpu:N`` (any N) and ``cuda:N`` (those present; may repeat).

    With ``on_hosts``, entries may name a host, as ``host-a/cuda:0``, and whether a device is there is seen there.
    Raises ``DeviceError`` for an empty list, an unknown type of device, or a device that is not present.
    """
    if isinstance(devices, str | torch.device) or not devices:
        raise DeviceError(f"devices must be a list such as ['cpu:0', 'cpu:1'], got {devices!r}")
    resolved: list[Device] = []
    for entry in devices:
        text = str(entry)
        host, device = DeviceName.parse(text)
        if "/" in text and not (on_hosts and host and device):
            raise DeviceError(f"{entry!r} names a host; give a device of this machine, or workers that are on hosts")
        physical = _physical(entry, device if host else entry, is_here=not on_hosts)
        repeats = sum(device.name.partition("#")[0] == text for device in resolved)
        resolved.append(Device(f"{text}#{repeats}" if repeats else text, physical))
    return resolved


def _physical(entry: str | torch.device, without_host: str | torch.device, *, is_here: bool) -> torch.device:
    try:
        device = torch.device(without_host)
    except (RuntimeError, TypeError):
        raise DeviceError(f"{entry!r} is no device; asyncpipe knows {_KNOWN}") from None
    kind = device.type
    if kind == "cpu":
        return torch.device("cpu")
    if kind not in ACCELERATORS:
        raise DeviceError(f"{entry!r} is a device of type {kind!r}; asyncpipe knows {_KNOWN}")
    if not is_here:
        return torch.device(kind, device.index or 0)
    module = torch.get_device_module(kind)
    count = module.device_count()
    # Not device.index: torch keeps it in eight bits, so cuda:256 would become cuda:0.
    number = str(entry).partition(":")[2]
    index = int(number) if number else module.current_device() if count else 0
    if not 0 <= index < count:
        present = ", ".join(f"{kind}:{k}" for k in range(count)) or f"no {kind.upper()} device"
        raise DeviceError(f"{entry!r} is not there; this machine has {present}, and 'cpu:N' for any N")
    return torch.device(kind, index)
