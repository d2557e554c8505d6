"""Optimizers whose states, and whose updates, are on the host: a stage's device has its parameters and gradients alone.

The optimizer is made over copies of the parameters in pinned memory. Each update takes the parameters and gradients as
they are on the device, so it does not matter who else has changed them, and puts the new parameters back::

    U(j)   compute stream  ──▶ parameters, gradients to the host ──┐             ┌──▶ parameters ──▶ (next step)
           host                                                   wait ▶ update ─┘

The thread of the device waits meanwhile, as the device has nothing to do for this stage before its next forward; other
devices go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from asyncpipe.ops.device.copies import HostCopy, queue_host_copy
from asyncpipe.ops.device.streams import AcceleratorStream, LaneStream, record

__all__ = ["on_host", "original", "update", "updated_by"]

_ORIGINAL = "_asyncpipe_original"
"""The attribute of a copy that has the parameter on the device."""


def on_host(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Copies of ``parameters`` for an optimizer. Blocks until they are there."""
    copies = []
    for parameter in parameters:
        copy = nn.Parameter(HostCopy(parameter.detach()).wait(), requires_grad=parameter.requires_grad)
        setattr(copy, _ORIGINAL, parameter)
        copies.append(copy)
    return copies


def updated_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The stage's parameters that ``optimizer`` updates, in its order, wherever it does."""
    return [original(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def original(parameter: Any) -> nn.Parameter:
    """The stage's own parameter, of one that may be a copy on the host."""
    found: nn.Parameter = getattr(parameter, _ORIGINAL, parameter)
    return found


def update(optimizer: torch.optim.Optimizer, stream: LaneStream) -> None:
    """Update the parameters by their gradients, and clear these. ``stream`` is the stage's compute stream, and current.

    Blocks for the host's part, if the optimizer is there.
    """
    copies = [p for group in optimizer.param_groups for p in group["params"] if original(p) is not p]
    with torch.no_grad():
        for copy in copies:
            parameter = original(copy)
            copy.detach().copy_(parameter, non_blocking=True)
            copy.grad = None if parameter.grad is None else queue_host_copy(parameter.grad)
    if copies and isinstance(stream, AcceleratorStream):
        # Hazard: the optimizer reads on the host what the copies have not brought yet; and overwrites what the copy
        # back of the step before, on the same stream, has read.
        record(stream.stream).synchronize()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for copy in copies:
            parameter = original(copy)
            parameter.copy_(copy.detach(), non_blocking=True)
            parameter.grad = None
