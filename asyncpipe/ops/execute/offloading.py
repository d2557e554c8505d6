"""What a forward keeps for its backward, on its way to the host and back.

Autograd's saved-tensor hooks hand over what F saves; the stage's inputs, which are leaves of its graph, are kept as
well. Tensors that share memory share it again when they are back::

    F(i,j)      autograd saves t ──▶ place of t in a block           block: a storage on the device
    O(i,j)      copies each block to pinned memory                   device and host
    after O     the device's copy is dropped                         host
    L(i,j)      allocates each block again and copies it             device
    B(i,j)      autograd asks for t ◀── the same place               freed as the backward goes on

What stays: parameters and buffers, what the caller has given, small tensors, and what is no ordinary strided tensor.
With recomputation nothing is saved, and the stage's inputs are all that is kept.

**Streams.** All blocks are allocated on the compute stream, also those that come back, and freed there.
A stage's inputs may be of the stream that brought them; their copier has recorded the compute stream for them, so their
memory is used again behind the point where the compute stream drops them. So the hazards are these: O reads after F
(its dependency); the memory is given back just before something that has waited for O uses it (the action after the
next one, or a load before that, depend on it); L writes when what had the memory before is done (it waits for the
compute stream as it is when L is queued, that is up to the action that L depends on); B reads after L. If a step ends
early, nothing waits for the copies that are under way, and their memory is kept by ``record_stream``.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.ops.device.copies import queue_host_copy
from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.device.streams import AcceleratorStream, LaneStream, record
from asyncpipe.ops.torch_internals import storage_id, version_of

__all__ = ["KeptActivations", "OffloadedGraph", "ghost", "has_own_memory", "storages_of"]

HOST_TYPES = {"cpu"}
"""The types of devices whose memory is the host's. Benchmarks take a CPU out, to have something to offload from."""
SMALLEST = 1 << 16
"""Bytes from which on a block is offloaded: a bus takes about as long to begin a copy as for so many bytes."""


def has_own_memory(device: Device) -> bool:
    """Whether the memory of ``device`` is not the host's, so that there is something to offload from."""
    return device.physical.type not in HOST_TYPES


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """The identities of the memory of ``tensors``, as long as it is there."""
    return {storage_id(tensor) for tensor in tensors if tensor.layout is torch.strided}


class OffloadedGraph:
    """What of a task graph is offloaded."""

    def __init__(self, graph: TaskGraph) -> None:
        self.frees = graph.frees()
        """By task: the (micro-batch, stage) whose memory on the device it gets."""
        self.kept = frozenset(key for keys in self.frees.values() for key in keys)
        """The (micro-batch, stage) whose activations are offloaded."""


class _OffloadedStorage:
    """The memory of one storage: on the device, on the host, or both."""

    __slots__ = ("back", "device", "host", "is_whole")

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.is_whole = storage.nbytes() > 0
        """Whether it is the whole storage, as bytes. The storages of some backends have none to show; then it is the
        tensor alone."""
        empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.device: Tensor | None = empty.set_(storage) if self.is_whole else tensor.detach()
        self.host: Tensor | None = None
        self.back: Tensor | None = None

    def offload(self) -> int:
        """Queue the copy to the host on the current stream; the bytes."""
        assert self.device is not None
        self.host = queue_host_copy(self.device)
        return self.host.nbytes

    def allocate(self, device: torch.device) -> None:
        """Allocate it on the device again, on the current stream."""
        assert self.host is not None
        self.back = torch.empty(self.host.shape, dtype=self.host.dtype, device=device)

    def load(self) -> int:
        """Queue the copy from the host on the current stream; the bytes."""
        assert self.host is not None
        assert self.back is not None
        # The pinned memory is not used again before the copy is done: torch's allocator of it knows of the copy.
        self.back.copy_(self.host, non_blocking=True)
        copied, self.host = self.host.nbytes, None
        return copied


class _SavedTensor:
    """Where a saved tensor is in its block; what autograd holds in its place."""

    __slots__ = ("_dtype", "_offset", "_size", "_source", "_stride", "_version", "block")

    def __init__(self, block: _OffloadedStorage, tensor: Tensor) -> None:
        self.block = block
        self._dtype, self._size = tensor.dtype, tensor.size()
        self._stride, self._offset = tensor.stride(), tensor.storage_offset()
        self._source: Tensor | None = tensor
        self._version = version_of(tensor)

    def leave(self) -> None:
        """The values are read by the offload. Remembers whether they are still what was saved."""
        if self._source is not None and version_of(self._source) != self._version:
            self._version = -1
        self._source = None

    def tensor(self) -> Tensor:
        """The tensor, on its device again. Raises as autograd does if it was overwritten before it was offloaded."""
        if self._version < 0:
            _raise_overwritten(self._size)
        assert self.block.back is not None, "the backward runs before the load"
        if not self.block.is_whole:
            return self.block.back
        empty = torch.empty(0, dtype=self._dtype, device=self.block.back.device)
        return empty.set_(self.block.back.untyped_storage(), self._offset, self._size, self._stride)


class _StayingTensor:
    """A saved tensor that is not offloaded. With hooks, autograd leaves it to them to see what was overwritten."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = version_of(tensor)

    def tensor(self) -> Tensor:
        if version_of(self._tensor) != self._version:
            _raise_overwritten(self._tensor.size())
        return self._tensor


def _raise_overwritten(size: torch.Size) -> None:
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {tuple(size)}, which was saved for the backward"
    )


class KeptActivations:
    """What the forward of one micro-batch at one stage keeps. Used on the thread of the stage's device."""

    def __init__(self, stay: AbstractSet[int]) -> None:
        """What has a storage of ``stay`` (``storages_of``) is not offloaded."""
        self._stay = stay
        self._blocks: dict[int, _OffloadedStorage] = {}
        """By the identity of their memory, which is not used again: blocks hold it until all are made."""
        self._places: list[_SavedTensor] = []
        self._inputs: list[tuple[Tensor, _SavedTensor]] = []
        self._device: torch.device | None = None
        self._is_free = False
        self._streams: list[AcceleratorStream] = []
        """Where copies are under way that no other stream has waited for."""

    def saving(self) -> AbstractContextManager[object]:
        """A context: what autograd saves inside is kept here."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> _SavedTensor | _StayingTensor:
        # Autograd hands over tensors without a graph, so that none refers to itself.
        return self._place(tensor) or _StayingTensor(tensor)

    def keep_inputs(self, tensors: Iterable[Tensor]) -> None:
        """Keep the leaves of the stage's graph as well. In between they have no values."""
        for tensor in tensors:
            if (place := self._place(tensor.detach())) is not None:
                self._inputs.append((tensor, place))

    def _place(self, tensor: Tensor) -> _SavedTensor | None:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or storage_id(tensor) in self._stay:
            return None
        if max(tensor.nbytes, tensor.untyped_storage().nbytes()) < SMALLEST:
            return None
        self._device = tensor.device
        if (block := self._blocks.get(storage_id(tensor))) is None:
            block = self._blocks[storage_id(tensor)] = _OffloadedStorage(tensor)
        place = _SavedTensor(block, tensor)
        self._places.append(place)
        return place

    def offload(self, lane: LaneStream) -> int:
        """Queue the copies to the host on ``lane``, which is current and behind the forward; the bytes."""
        self._note(lane)
        copied = sum([block.offload() for block in self._blocks.values()])
        for place in self._places:
            place.leave()
        self._places.clear()
        return copied

    def free(self) -> None:
        """Drop what is on the device, once. The stream that will use the memory has waited for the offload."""
        if self._is_free:
            return
        self._is_free = True
        for tensor, _ in self._inputs:
            # Of the same shape, as the engine compares it with that of gradients.
            tensor.data = tensor.data.new_empty(()).expand(tensor.shape)
        for block in self._blocks.values():
            block.device = None
        self._streams.clear()

    def load(self, lane: LaneStream, compute: LaneStream) -> int:
        """Queue the copies back on ``lane``, which is current and behind the offload; the bytes."""
        assert self._device is not None or not self._blocks
        with compute.use():
            for block in self._blocks.values():
                assert self._device is not None
                block.allocate(self._device)
        if isinstance(compute, AcceleratorStream):
            # Hazard: the memory was freed on the compute stream, where what used it before may still be running.
            lane.wait(record(compute.stream))
        self._note(lane)
        copied = sum([block.load() for block in self._blocks.values()])
        for tensor, place in self._inputs:
            tensor.data = place.tensor()
        self._inputs.clear()
        return copied

    def abandon(self) -> None:
        """The step ends early: whatever is dropped from now on, its memory outlives the copies that are under way."""
        with suppress(RuntimeError):  # The device has failed, and that is raised already.
            for stream in self._streams:
                for block in self._blocks.values():
                    # Hazard: a copy reads the one, or writes the other, while it is dropped on the compute stream.
                    stream.keep(tensor for tensor in (block.device, block.back) if tensor is not None)

    def _note(self, lane: LaneStream) -> None:
        if isinstance(lane, AcceleratorStream):
            self._streams.append(lane)


def _unpack(kept: _SavedTensor | _StayingTensor) -> Tensor:
    return kept.tensor()


def ghost(output: Tensor) -> Tensor:
    """A tensor without memory in the place of ``output``, whose backward begins where that of ``output`` does.

    A stage's graph needs its outputs as ends of backwards, and not their values.
    """
    if output.nbytes < SMALLEST or type(output) is not Tensor:
        return output
    if not output.requires_grad:
        return _without_memory(output)
    made: Tensor = _Ghost.apply(output)  # type: ignore[no-untyped-call]
    return made


def _without_memory(tensor: Tensor) -> Tensor:
    return tensor.detach().new_empty(()).expand(tensor.shape)


class _Ghost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return _without_memory(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
