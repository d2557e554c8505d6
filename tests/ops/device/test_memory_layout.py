"""Values for other processes: tensors arrive as they lie in memory, and buffers are safe from the garbage collector."""

from __future__ import annotations

import pytest
import torch

from asyncpipe.ops.device.memory_layout import ALIGNMENT
from asyncpipe.ops.device.wire import from_buffers, from_wire, to_buffers, to_wire

WHOLE = torch.arange(60.0).reshape(3, 4, 5)
LARGE = torch.arange(100_000.0)


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
        WHOLE[1:],
        LARGE[1:],
        LARGE[::2],
        LARGE.unfold(0, 40, 20)[1:],
        torch.arange(10.0).unfold(0, 4, 2),
        WHOLE[1, 2, 3],
        (torch.arange(9) > 3)[3:],
    ],
)
def test_a_tensor_keeps_its_strides_and_its_alignment(tensor):
    for there in (from_wire(to_wire(tensor, "it")), *from_buffers(to_buffers([tensor], "it"))):
        assert torch.equal(there, tensor)
        assert there.stride() == tensor.stride() or tensor.is_contiguous()
        assert (there.data_ptr() - tensor.data_ptr()) % ALIGNMENT == 0 or not tensor.numel()
        assert not there._is_view()
