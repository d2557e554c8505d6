"""Edges between two processes that share one GPU: this one and another, which sends everything back."""

from __future__ import annotations

import logging

import pytest
import torch
from edge_helpers import message, peer

from asyncpipe.ops.device.streams import record
from asyncpipe.ops.edges import cuda_calls
from asyncpipe.ops.edges.cuda_memory import CudaMemoryIn

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(120)]
DEVICE = torch.device("cuda:0")


@pytest.mark.parametrize("transport", ["shared_memory", "host_memory"])
def test_a_tensor_of_a_gpu_by_each_transport(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    stream = torch.cuda.Stream(DEVICE)
    with caplog.at_level(logging.WARNING), peer(transport=transport, device=DEVICE) as other:
        assert isinstance(other.edges.into[1]._payload, CudaMemoryIn) == (transport == "shared_memory")
        for task, size in enumerate([1, 1000, 1 << 23, 3, 1 << 22] * 6):
            with torch.cuda.stream(stream):
                sent = torch.randn(size, 2, device=DEVICE).t() * task
                other.out.send(message(task, sent, None, sent.bool(), ready=record(stream)))
            received = other.inbox.take(wait=False)
            assert received.ready is not None
            with torch.cuda.stream(stream):
                stream.wait_event(received.ready)
                back, nothing, bits = received.tensors
                assert nothing is None
                assert back is not None
                assert bits is not None
                assert back.device == bits.device == DEVICE
                assert torch.equal(back, sent)
                assert torch.equal(bits, sent.bool())
                back.record_stream(stream)
                bits.record_stream(stream)
            del received, back, bits
    assert "share no memory" not in caplog.text


def test_memory_of_the_host_is_pinned_and_let_go() -> None:
    mapped = cuda_calls.PinnedMap(-1, 1 << 22)
    tensor = torch.frombuffer(memoryview(mapped), dtype=torch.uint8)
    assert tensor.is_pinned()
    address = tensor.data_ptr()
    assert not cuda_calls.pin(address, 1 << 22), "it is already"
    torch.ones(1, device=DEVICE).add_(1)  # No kernel hears of that.
    del tensor, mapped
    again = torch.zeros(1 << 22, dtype=torch.uint8)
    assert cuda_calls.pin(again.data_ptr(), again.nbytes)
    cuda_calls.unpin(again.data_ptr())


def test_a_peer_that_is_killed_leaves_no_memory_here() -> None:
    before = torch.cuda.memory_allocated(DEVICE)
    with peer(transport="shared_memory", device=DEVICE) as other:
        for task in range(4):
            other.out.send(message(task, torch.ones(1 << 20, device=DEVICE), ready=record(torch.cuda.current_stream())))
        other.process.kill()
        other.inbox.error()
        other.inbox.drop()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(DEVICE) == before
