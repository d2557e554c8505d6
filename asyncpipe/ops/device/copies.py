"""Copies between lanes: how a tensor gets from one stage's device to another's.

==========  ==========  ===========================================================================================
from        to          how
==========  ==========  ===========================================================================================
CPU         CPU         handed over as it is
CUDA        same CUDA   handed over as it is; the event of the copy task orders the two compute streams
CUDA        other CUDA  device to device, on a side stream of the source and the copy stream of the destination
CUDA        CPU         into pinned memory, on a side stream of the source; the CPU lane waits for the event
CPU         CUDA        through pinned memory, on the copy stream of the destination
==========  ==========  ===========================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.ops.device.streams import CudaStream, LaneStream

__all__ = ["Copier", "make_copiers", "to_device"]


class Copier:
    """Brings tensors to one lane's device for a compute stream of that device to read."""

    def __init__(self, lane: LaneStream, compute: LaneStream) -> None:
        """``lane`` is the copy lane's stream, ``compute`` that of the stage that will read the copies."""
        self._lane = lane
        self._compute = compute
        self._sides: dict[torch.device, CudaStream] = {}

    def side(self, tensors: Sequence[Tensor | None]) -> CudaStream | None:
        """The stream of the source device that a copy out of it needs beside the lane's own; ``None`` if none.

        PyTorch queues a copy out of a CUDA device on a stream of that device. It must be none of the compute
        streams: the copy would stand in line with them.
        """
        source = next((t.device for t in tensors if t is not None and t.is_cuda), None)
        if source is None or source == self._lane.device:
            return None
        if source not in self._sides:
            self._sides[source] = CudaStream(source)
        side = self._sides[source]
        side.tick()
        return side

    def copy(self, tensors: Sequence[Tensor | None], side: CudaStream | None) -> list[Tensor | None]:
        """The tensors on the lane's device. The caller has made ``side`` and the lane wait for their producer."""
        if side is not None:
            # Read on the side stream, allocated on the producer's: freed meanwhile, its memory must not be reused.
            side.keep(tensor for tensor in tensors if tensor is not None)
            with side.use(), self._lane.use():
                moved = [None if tensor is None else to_device(tensor, self._lane.device) for tensor in tensors]
        else:
            moved = [None if tensor is None else to_device(tensor, self._lane.device) for tensor in tensors]
        # Allocated on the copy stream (or, handed over, on another compute stream), read on this compute stream.
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
    """``tensor`` on ``device``; queued on the current streams where either end is CUDA, through pinned memory."""
    if tensor.device == device:
        return tensor
    if device.type == "cpu":
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)
    if tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
