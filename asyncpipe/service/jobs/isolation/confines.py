"""What the process of a job may use. Called in that process, before it does anything of the job."""

from __future__ import annotations

import logging
import resource

import torch

from asyncpipe.service.jobs.isolation.messages import Confines
from asyncpipe.service.malloc import limit_arenas

__all__ = ["confine"]

_logger = logging.getLogger(__name__)


def confine(confines: Confines) -> None:
    """Have this process, and its children, use no more than ``confines``.

    What it allocates beyond its memory fails there, as a ``MemoryError`` or torch's own error; each of its children has
    the same limit by itself.
    """
    limit_arenas(confines.devices)
    if confines.memory is not None:
        # Of data, and not of addresses: torch and CUDA reserve far more of these than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (confines.memory, confines.memory))
    for name, limit in confines.device_memory.items():
        device = torch.device(name)
        if device.type == "cuda" and torch.cuda.is_available():
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
