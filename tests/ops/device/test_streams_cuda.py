"""Streams, fences and timings on one GPU with two logical devices: nothing reads what is not written yet."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.ops.device.devices import resolve_devices
from asyncpipe.ops.device.streams import AcceleratorStream, Fence, LaneStream, make_streams

SIZE = 1 << 20
BUSY = 100_000_000
"""Device cycles: some 50 ms, in which a reader that does not wait sees the old value."""


def two_devices() -> tuple[Mapping[Lane, LaneStream], AcceleratorStream, AcceleratorStream]:
    """Two logical devices on one GPU: every lane's stream, and their compute streams."""
    devices = resolve_devices(["cuda:0", "cuda:0"])
    streams = make_streams(devices, [Lane(device.name, queue) for device in devices for queue in Queue])
    left, right = streams[Lane("cuda:0", Queue.COMPUTE)], streams[Lane("cuda:0#1", Queue.COMPUTE)]
    assert isinstance(left, AcceleratorStream)
    assert isinstance(right, AcceleratorStream)
    return streams, left, right


def recorded(stream: AcceleratorStream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream.stream)
    return event


def late(value: float) -> Tensor:
    """A tensor that the current stream writes after a while."""
    tensor = torch.zeros(SIZE, device="cuda:0")
    torch.cuda._sleep(BUSY)
    return tensor.add_(value)


@pytest.mark.cuda
def test_a_fence_puts_the_caller_behind_the_lanes() -> None:
    streams, left, right = two_devices()
    late(0.0)  # The kernels are loaded when first used, which takes longer than the lanes stay busy.
    torch.cuda.synchronize()
    fence = Fence(streams.values())
    results = []
    for value, stream in ((1.0, left), (2.0, right)):
        with stream.use():
            results.append(late(value))
    fence.end(results)
    total = results[0] + results[1]  # On the caller's stream, queued while the lanes are busy.
    assert not recorded(left).query(), "the lanes are still busy, or the test shows nothing"
    assert bool((total == 3).all())


@pytest.mark.cuda
def test_memory_that_another_stream_still_reads_is_not_reused() -> None:
    """``keep`` (record_stream): without it the allocator reuses the block at once, and it is overwritten."""
    _, left, right = two_devices()
    with left.use():
        tensor = torch.full((SIZE,), 4.0, device="cuda:0")
    address = tensor.data_ptr()
    with right.use():
        right.wait(recorded(left))
        torch.cuda._sleep(BUSY)
        result = tensor * 1
    right.keep([tensor, torch.ones(1)])
    del tensor
    with left.use():
        other = torch.full((SIZE,), -1.0, device="cuda:0")
    assert other.data_ptr() != address
    torch.cuda.synchronize()
    assert bool((result == 4).all())
