"""Copies between lanes: how a tensor gets from one stage's device to another's.

==========  ==========  ===========================================================================================
from        to          how
==========  ==========  ===========================================================================================
CPU         CPU         passed on without a copy
CUDA        same CUDA   passed on without a copy; the event of the copy task orders the two compute streams
CUDA        other CUDA  device to device, on a side stream of the source and the copy stream of the destination
CUDA        CPU         into pinned memory, on a side stream of the source; the CPU lane waits for the event
CPU         CUDA        through pinned memory, on the copy stream of the destination
==========  ==========  ===========================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.ops.device.streams import AcceleratorStream, LaneStream

__all__ = ["Copier", "make_copiers", "to_device"]


class Copier:
    """Copies tensors to one lane's device, where a compute stream of that device will read them."""

    def __init__(self, lane: LaneStream, compute: LaneStream) -> None:
        """``lane`` is the copy lane's stream, ``compute`` that of the stage that will read the copies."""
        self._lane = lane
        self._compute = compute
        self._sides: dict[torch.device, AcceleratorStream] = {}

    def side(self, tensors: Sequence[Tensor | None]) -> AcceleratorStream | None:
        """The second stream that copying ``tensors`` needs, on the source device; ``None`` if it needs none.

        PyTorch queues a copy out of an accelerator on that device's current stream. A compute stream must not be
        current then: the copy would wait behind the computations queued there.
        """
        source = next((t.device for t in tensors if t is not None and not t.is_cpu), None)
        if source is None or source == self._lane.device:
            return None
        if source not in self._sides:
            self._sides[source] = AcceleratorStream(source)
        side = self._sides[source]
        side.tick()
        return side

    def copy(self, tensors: Sequence[Tensor | None], side: AcceleratorStream | None) -> list[Tensor | None]:
        """The tensors on the lane's device.

        ``side`` and the lane's stream must already wait for the task that produced ``tensors``, and the lane's stream
        must be current.
        """
        if side is not None:
            # Hazard: the side stream reads memory allocated on the producer's stream. If the tensor is freed
            # meanwhile, that memory must not be reused before the copy is done.
            side.keep(tensor for tensor in tensors if tensor is not None)
        with nullcontext() if side is None else side.use(), self._lane.use():
            moved = [None if tensor is None else to_device(tensor, self._lane.device) for tensor in tensors]
        # Hazard: the compute stream reads memory allocated on the copy stream (or, if passed on without a copy, on
        # another compute stream). It must not be reused before that read is done.
        self._compute.keep(tensor for tensor in moved if tensor is not None)
        return moved


def make_copiers(streams: Mapping[Lane, LaneStream]) -> dict[Lane, Copier]:
    """A copier for every copy lane, given the streams of all lanes."""
    return {
        lane: Copier(stream, streams[Lane(lane.device, Queue.COMPUTE)])
        for lane, stream in streams.items()
        if lane.queue is not Queue.COMPUTE
    }


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``. Copies from or to an accelerator go through pinned memory, on the current streams."""
    if tensor.device == device:
        return tensor
    if device.type == "cpu":
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)
    if tensor.is_cpu and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
