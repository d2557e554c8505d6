"""Bytes that a physical device has, holds and has held: torch's allocator on accelerators, the process on the CPU."""

from __future__ import annotations

import os
import resource
from functools import cache
from pathlib import Path

import torch

from asyncpipe.core.records.step_notes import DeviceMemory

__all__ = ["allocated_bytes", "device_memory", "host_limit"]

_STATM = Path("/proc/self/statm")
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The files with a Linux container's memory limit: of control groups version 2, then of version 1."""


def device_memory(device: torch.device) -> DeviceMemory:
    """Bytes of ``device`` that are allocated now, that were allocated at the peak, and that can be allocated at most.

    On an accelerator: this process's allocations by torch, and the memory of the whole device; takes about 100 µs. On
    the CPU: this process's resident memory, and the limit of its container or the machine's memory; takes about 20 µs.
    May be called on any thread.
    """
    if device.type != "cpu":
        module = torch.get_device_module(device)
        statistics = module.memory_stats(device)
        limit = module.get_device_properties(device).total_memory
        name = "allocated_bytes.all"
        return DeviceMemory(statistics.get(f"{name}.current", 0), statistics.get(f"{name}.peak", 0), limit)
    allocated = allocated_bytes(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return DeviceMemory(allocated, max(peak, allocated), host_limit())


def allocated_bytes(device: torch.device) -> int:
    """Bytes of ``device`` that are allocated now, as ``device_memory`` counts them."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).memory_allocated(device))
    return int(_STATM.read_bytes().split()[1]) * resource.getpagesize()


@cache
def host_limit() -> int:
    """The bytes that this process may use: its container's limit, at most the machine's memory. Read once."""
    machine = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    for path in _LIMITS:
        try:
            return min(int(path.read_text(encoding="ascii")), machine)
        except (OSError, ValueError):  # No such file, or it says "max".
            continue
    return machine
