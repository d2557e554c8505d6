"""What the controller and a worker say to each other of a pipeline."""

from __future__ import annotations

import pytest
import torch

from asyncpipe.ops.device.wire import from_buffers, to_buffers
from asyncpipe.pipeline.wire_messages import Pieces


def chunks(dtype=torch.float32):
    return torch.arange(21 * 3).to(dtype).reshape(21, 3)[1:].chunk(6)


@pytest.mark.parametrize(
    ("values", "is_whole"),
    [
        (chunks(), True),
        (chunks(torch.int64), True),
        (chunks()[::-1], False),
        (chunks()[::2], False),
        ([*chunks(), torch.zeros(3)], False),
        ([*chunks(), 3], False),
        (torch.arange(12).reshape(3, 4).chunk(2, 1), False),
        ([torch.zeros(2, requires_grad=True)] * 2, False),
        ([{0: torch.zeros(2)}] * 2, False),
        (chunks(torch.complex64)[0].conj().chunk(2), False),
        ([torch.zeros(0)] * 2, False),
        ([], False),
    ],
)
def test_micro_batches_travel_as_one_tensor_where_they_are_one(values, is_whole):
    sent = Pieces.of(values)
    assert (sent.whole is not None) is is_whole
    found = from_buffers([memoryview(bytearray(each.raw())) for each in to_buffers(sent, "them")]).unpacked()
    assert len(found) == len(values)
    for value, received in zip(values, found, strict=True):
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, received)
            assert (value.dtype, value.shape) == (received.dtype, received.shape)
            assert received.is_leaf
            assert received.requires_grad == value.requires_grad
        else:
            assert str(value) == str(received)
    if is_whole:
        versions = [tensor._version for tensor in found]
        found[0].zero_()
        assert [tensor._version for tensor in found] == [versions[0] + 1, *versions[1:]]
