"""Values for other processes: tensors arrive as they lie in memory, and buffers are safe from the garbage collector."""

from __future__ import annotations

import gc

import pytest
import torch

from asyncpipe.ops.device.strides import strides_of
from asyncpipe.ops.device.wire import from_buffers, from_wire, to_buffers, to_wire

WHOLE = torch.arange(60.0).reshape(3, 4, 5)


@pytest.mark.parametrize(
    "tensor",
    [
        WHOLE,
        WHOLE.transpose(0, 2),
        WHOLE[:, :, ::2],
        WHOLE[:, 1],
        WHOLE[1:, :, 2:4].transpose(0, 1),
        WHOLE[:, :1].expand(3, 7, 5),
        torch.tensor(2.0).expand(3, 4),
        WHOLE[:0].transpose(0, 1),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(6, 4, dtype=torch.complex64)[::2].conj(),
    ],
)
def test_a_tensor_keeps_its_strides(tensor):
    for there in (from_wire(to_wire(tensor, "it")), *from_buffers(to_buffers([tensor], "it"))):
        assert torch.equal(there, tensor)
        assert there.stride() == tensor.stride() or tensor.is_contiguous()


def test_elements_that_overlap_arrive_side_by_side():
    tensor = torch.arange(10.0).unfold(0, 4, 2)
    assert strides_of(tensor) is None
    there = from_wire(to_wire(tensor, "it"))
    assert torch.equal(there, tensor)
    assert there.is_contiguous()


def test_no_memory_is_sent_for_what_a_view_does_not_show():
    large = torch.zeros(1000, 1000)
    assert len(to_wire(large[:, 0], "it")) < 10_000
    assert len(to_wire(large[:1].expand(1000, 1000), "it")) < 10_000


def test_buffers_may_be_garbage_in_a_cycle():
    # On a crash: CPython 3.11 cannot drop a PickleBuffer of a memoryview that way.
    for _ in range(3):
        cycle = [to_buffers([torch.ones(3), torch.ones(5000)], "it")]
        cycle.append(cycle)
        del cycle
        gc.collect()
