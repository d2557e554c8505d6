"""Streams of accelerators: lent, given back, and counted.

torch has 32 streams a device and hands them out in turn, so in a long process two objects would come to share one.
Hazard: the optimizer of pipeline A reads gradients on its caller's stream and frees them. The next task of pipeline B
on a shared stream could then reuse that memory too early, because ``Fence.begin`` makes only the streams of A wait for
the caller of A. So a stream that was given back is lent again before torch is asked for another one.

A GPU has as many hardware queues as ``CUDA_DEVICE_MAX_CONNECTIONS`` says. Streams that share one wait for one another:
nothing is wrong then, but less runs at once, and a kernel that hangs holds more than its own stream.
"""

from __future__ import annotations

import logging
import os
from typing import Any
from weakref import finalize

import torch

__all__ = ["lend", "lent_streams"]

_logger = logging.getLogger(__name__)

# Lists, and no counter: threads lend at the same time, and the collector gives back on any of them.
_made: dict[torch.device, list[Any]] = {}
_unused: dict[torch.device, list[Any]] = {}
_told: set[torch.device] = set()


def lend(device: torch.device, borrower: object) -> Any:
    """A non-default stream that no other object has (while at most 32 are lent), until ``borrower`` is collected."""
    unused = _unused.setdefault(device, [])
    try:
        stream = unused.pop()
    except IndexError:
        stream = torch.get_device_module(device).Stream(device)
        _made.setdefault(device, []).append(stream)
    finalize(borrower, unused.append, stream).atexit = False
    lent, queues = lent_streams(device), _hardware_queues()
    if lent > queues and device not in _told:
        _told.add(device)
        _logger.warning(
            "this process uses %d streams of %s, which has %d hardware queues: kernels on streams that share a queue "
            "wait for one another; set CUDA_DEVICE_MAX_CONNECTIONS=32 before the process starts",
            lent,
            device,
            queues,
        )
    return stream


def lent_streams(device: torch.device) -> int:
    """How many streams of ``device`` are lent now."""
    return len(_made.get(device, ())) - len(_unused.get(device, ()))


def _hardware_queues() -> int:
    try:
        return int(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"])
    except (KeyError, ValueError):
        return 8  # CUDA's default.
