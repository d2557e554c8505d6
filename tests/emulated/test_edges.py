"""Tensors of an accelerator on edges; both workers are in this process. Nothing is read before it is there."""

from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch
from edge_helpers import joined, message
from torch import distributed

from asyncpipe.ops.device.streams import record
from asyncpipe.ops.edges import nccl
from tests.emulated import device as emu

_queues = {}


class Group:
    """NCCL between two ends in one process: transfers run on a stream of its own, behind the one that is current."""

    def __init__(self, store, rank):
        if rank == 0:
            _queues[name := b"%d" % id(self)] = SimpleQueue()
            store.set("name", name)
        self.queue = _queues[store.get("name")]
        self.stream = emu.Stream()

    def send(self, tensors, peer, tag):
        self.stream.wait_stream(emu.current_stream())
        with emu.stream(self.stream):
            self.queue.put((tensors[0].clone(), record(self.stream)))
        return self

    def recv(self, tensors, peer, tag):
        values, ready = self.queue.get(timeout=20)
        for event in (ready, record(emu.current_stream())):
            self.stream.wait_event(event)
        with emu.stream(self.stream):
            tensors[0].copy_(values)
        values.record_stream(self.stream)
        return self

    def wait(self):
        emu.current_stream().wait_stream(self.stream)

    def get_error(self):
        return SimpleNamespace(name="SUCCESS")

    def abort(self):
        pass


@pytest.mark.parametrize("size", [3, 1 << 18])
@pytest.mark.parametrize("transport", ["shared_memory", "connection", "nccl"])
def test_what_a_lane_makes_arrives_where_another_lane_reads_it(monkeypatch, transport, size):
    monkeypatch.setattr(nccl, "_group", Group)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    # The emulation knows no views with another type.
    monkeypatch.setattr(nccl, "flat", lambda tensor: tensor.detach().as_strided((tensor.numel(),), (1,)))
    one, two = emu.Stream(), emu.Stream()
    with joined(transport=transport, device=torch.device("emu:0")) as pair:
        for task in range(4):
            with emu.stream(one):
                made = torch.full((2, size), float(task), device="emu:0")
                pair.out.send(message(task, made, made.t(), ready=record(one)))
            del made
            received = pair.inbox.take()
            with emu.stream(two):  # As a copy task, which waits for no event of the edge.
                for tensor, shape in zip(received.tensors, ((2, size), (size, 2)), strict=True):
                    assert tensor.device.type == ("emu" if transport == "nccl" else "cpu")
                    assert tensor.shape == shape
                    assert (tensor * 2).cpu().unique().tolist() == [2.0 * task]
                    tensor.record_stream(two)
            del received, tensor
