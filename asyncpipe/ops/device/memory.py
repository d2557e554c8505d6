"""How much memory a physical device has, holds and has held: torch's allocator on CUDA, the process on a CPU."""

from __future__ import annotations

import os
import resource
import sys
from functools import cache
from pathlib import Path

import torch

from asyncpipe.core.engine.events import DeviceMemory

__all__ = ["allocated_bytes", "device_memory"]

_STATM = Path("/proc/self/statm")
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where Linux tells a container's limit: control groups of version 2, then of version 1."""


def device_memory(device: torch.device) -> DeviceMemory:
    """Bytes of ``device`` that are allocated now, that were at most, and that there are to allocate.

    On CUDA those of torch's allocator in this process, against the whole device's memory; some 100 µs. On a CPU
    those of this process in memory, against its container's limit or the machine's memory; some 20 µs. Any thread.
    """
    if device.type == "cuda":
        statistics = torch.cuda.memory_stats(device)
        limit = torch.cuda.get_device_properties(device).total_memory
        name = "allocated_bytes.all"
        return DeviceMemory(statistics.get(f"{name}.current", 0), statistics.get(f"{name}.peak", 0), limit)
    allocated = allocated_bytes(device)
    return DeviceMemory(allocated, max(_process_peak(), allocated), _host_limit())


def allocated_bytes(device: torch.device) -> int:
    """Bytes of ``device`` that are allocated now, as ``device_memory`` counts them."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return int(_STATM.read_bytes().split()[1]) * _page_size()
    except OSError:  # No Linux: the peak is all that can be had.
        return _process_peak()


def _process_peak() -> int:
    """The most bytes that this process had in memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@cache
def _page_size() -> int:
    return os.sysconf("SC_PAGE_SIZE")


@cache
def _host_limit() -> int:
    """Bytes that this process may have: its container's limit, or what the machine has."""
    machine = os.sysconf("SC_PHYS_PAGES") * _page_size()
    for path in _LIMITS:
        try:
            return min(int(path.read_text(encoding="ascii")), machine)
        except (OSError, ValueError):  # Not there, or "max".
            continue
    return machine
