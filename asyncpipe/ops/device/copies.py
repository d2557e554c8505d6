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

What the caller gives comes by streams of its own (``inflow.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from math import inf
from time import perf_counter

import torch
from torch import Tensor

from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.ops.device.devices import await_event
from asyncpipe.ops.device.streams import AcceleratorStream, CpuStream, LaneStream, record

__all__ = ["Brought", "Copier", "HostCopy", "host_bandwidth", "make_copiers", "queue_host_copy", "to_device"]

Brought = tuple[list[Tensor], torch.Event, bool]
"""Tensors, the event behind their copies, and whether some are read from pinned memory of the caller's."""

PROBE = 32 << 20
"""Bytes that are copied to measure a bus."""


class Copier:
    """Copies tensors to one lane's device, where a compute stream of that device will read them."""

    def __init__(self, lane: LaneStream, compute: LaneStream) -> None:
        """``lane`` is the copying lane's stream, ``compute`` that of the stage that will read the copies."""
        self.lane, self.compute = lane, compute
        self._sides: dict[torch.device, AcceleratorStream] = {}
        self.is_on_host = isinstance(lane, CpuStream)
        self._inner: Copier | None = None

    def side(self, tensors: Sequence[Tensor | None]) -> AcceleratorStream | None:
        """The second stream that copying ``tensors`` needs, on the source device; ``None`` if it needs none.

        PyTorch queues a copy out of an accelerator on that device's current stream. A compute stream must not be
        current then: the copy would wait behind the computations queued there.
        """
        source = next((t.device for t in tensors if t is not None and not t.is_cpu), None)
        if source is None or source == self.lane.device:
            return None
        if source not in self._sides:
            self._sides[source] = AcceleratorStream(source)
        return self._sides[source]

    def copy(self, tensors: Sequence[Tensor | None], side: AcceleratorStream | None) -> list[Tensor | None]:
        """The tensors on the lane's device.

        ``side`` and the lane's stream must already wait for the task that produced ``tensors``, and the lane's stream
        must be current.
        """
        if side is not None:
            # Hazard: the side stream reads memory allocated on the producer's stream. If the tensor is freed
            # meanwhile, that memory must not be reused before the copy is done.
            side.keep(tensor for tensor in tensors if tensor is not None)
        is_here = side is None and all(tensor is None or tensor.device == self.lane.device for tensor in tensors)
        with nullcontext() if side is None else side.use(), nullcontext() if is_here else self.lane.use():
            moved = [None if tensor is None else _queue_copy(tensor, self.lane.device) for tensor in tensors]
        # Hazard: the compute stream reads memory allocated on the copy stream (or, if passed on without a copy, on
        # another compute stream). It must not be reused before that read is done.
        self.compute.keep(tensor for tensor in moved if tensor is not None)
        return moved

    def needs(self, tensors: Sequence[Tensor]) -> bool:
        """Whether some are not on the lane's device."""
        return any(tensor.device != self.lane.device for tensor in tensors)

    def bring(self, tensors: Sequence[Tensor], ready: Mapping[torch.device, torch.Event]) -> Brought:
        """As ``fetch``, to an accelerator, by a stream that has nothing else to do. On any thread."""
        # Not before: most stages take nothing from the caller. Two threads may make two, and one is dropped.
        self._inner = inner = self._inner or Copier(AcceleratorStream(self.lane.device), self.compute)
        lane, is_pinned = inner.lane, any(tensor.is_cpu and tensor.is_pinned() for tensor in tensors)
        assert isinstance(lane, AcceleratorStream)
        with lane.use(), torch.no_grad():
            if is_pinned or not all(tensor.is_cpu for tensor in tensors):
                for event in ready.values():
                    # Hazard: the copies read what the caller's streams may still be writing, to a device or, by a copy
                    # that does not block, to pinned memory.
                    lane.wait(event)
            return [inner.fetch(tensor, ready) for tensor in tensors], record(lane.stream), is_pinned

    def fetch(self, tensor: Tensor, ready: Mapping[torch.device, torch.Event]) -> Tensor:
        """A tensor of the caller's on the lane's device, to be read by what the lane runs from now on.

        ``ready`` has, by device, the event behind what the caller had queued there when the step began. The lane's
        stream is current, and behind these events if the caller may be writing the tensor.
        """
        if self.is_on_host and tensor.is_cpu:
            return tensor
        side = self.side([tensor])
        if side is None:
            moved = _queue_copy(tensor, self.lane.device)
            # Hazard: the compute stream reads memory allocated on the caller's stream, or on this lane's. It must not
            # be reused before that read is done.
            self.compute.keep([moved])
            return moved
        # Hazard: the copy, on the side stream, reads what the caller may still be writing.
        side.wait(ready[tensor.device])
        (copied,) = self.copy([tensor], side)
        assert copied is not None
        if not isinstance(self.lane, AcceleratorStream):
            # Hazard: the stage reads on the host what the copy has not brought yet.
            self.lane.wait(record(side.stream))
        return copied


def make_copiers(streams: Mapping[Lane, LaneStream]) -> dict[Lane, Copier]:
    """A copier for every lane, given the streams of all lanes; on compute lanes it fetches the caller's tensors."""
    return {lane: Copier(stream, streams[Lane(lane.device, Queue.COMPUTE)]) for lane, stream in streams.items()}


class HostCopy:
    """A tensor on its way to the host, by the current stream of its device; a CPU tensor is there already."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = _queue_copy(tensor, torch.device("cpu"))
        self._there = None
        if not tensor.is_cpu:
            self._there = record(torch.get_device_module(tensor.device).current_stream(tensor.device))

    def now(self) -> Tensor | None:
        """The tensor on the CPU, if it is there."""
        return self._copy if self._there is None or self._there.query() else None

    def wait(self) -> Tensor:
        """The tensor on the CPU; blocks until the copy is over, and not for what was queued behind it."""
        if self._there is not None:
            # Hazard: the host reads what the copy has not brought yet.
            await_event(self._there)
        return self._copy


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``, to be read there at once; blocks only if it comes from an accelerator to the CPU."""
    return HostCopy(tensor).wait() if device.type == "cpu" else _queue_copy(tensor, device)


def _queue_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``, through pinned memory if one of the two is a CPU, on the current streams.

    What comes to the CPU must not be read before an event behind the copy.
    """
    if tensor.device == device:
        return tensor
    if device.type == "cpu":
        return queue_host_copy(tensor)
    if tensor.is_cpu and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def queue_host_copy(tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` in pinned memory of the host, by the current stream; read it there behind an event."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.cpu()  # Blocks: torch has no pinned memory for these.
    return _pinned_like(tensor).copy_(tensor, non_blocking=True)


def host_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy from ``device`` to pinned memory brings; infinite on a CPU. Blocks for some ms."""
    if device.type == "cpu":
        return inf
    probe, seconds = torch.zeros(PROBE, dtype=torch.uint8, device=device), inf
    for _ in range(3):
        begun = perf_counter()
        HostCopy(probe).wait()
        seconds = min(seconds, perf_counter() - begun)
    return PROBE / seconds


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=not tensor.is_cpu)
