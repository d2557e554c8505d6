"""Tensors of an accelerator on edges; both workers are in this process. Nothing is read before it is there."""

import logging
from contextlib import ExitStack
from itertools import count
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch
from edge_helpers import joined, message
from torch import distributed

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.part import part
from asyncpipe.core.schedules.gpipe import GPipeSchedule
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.ops.device.streams import record
from asyncpipe.ops.edges import cuda_calls, nccl
from asyncpipe.ops.edges.cuda_memory import CudaMemoryIn, CudaMemoryOut
from asyncpipe.ops.edges.shared_memory import SharedMemoryIn, SharedMemoryOut
from asyncpipe.ops.execute.binder import Binder
from asyncpipe.ops.execute.crossings import Crossings
from asyncpipe.ops.execute.step_tensors import StepTensors
from asyncpipe.ops.model.microbatch import Packet
from tests.emulated import device as emu

DEVICE = torch.device("emu:0")
ON_DEVICE = ["shared_memory", "host_memory", "nccl"]
_queues = {}


class Group:
    """NCCL between two ends in one process: transfers run on a stream of its own, behind the one that is current.

    A receive that is queued first brings what is sent later: its memory is that of the sender's kernel.
    """

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


class Calls:
    """In place of ``cuda_calls``: handles are numbers of what this process has."""

    def __init__(self, monkeypatch):
        self.pinned, self.shared, self.numbers, self.broken = {}, {}, count(1), ""
        for name in ("pin", "unpin", "share", "open_shared", "forget"):
            monkeypatch.setattr(cuda_calls, name, getattr(self, name))
        monkeypatch.setattr(cuda_calls, "shareable_event", emu.Event)

    def pin(self, address, size):
        assert address not in self.pinned
        self.pinned[address] = size
        return True

    def unpin(self, address):
        del self.pinned[address]

    def share(self, memory, event):
        if self.broken == "share":
            raise RuntimeError("this memory is an allocator's of its own")
        number = next(self.numbers)
        self.shared[number] = memory, event
        return (number, b"handle"), b"event"

    def open_shared(self, handles, device):
        (number, handle), event = handles
        assert (handle, event, device) == (b"handle", b"event", DEVICE)
        if self.broken == "open":
            raise RuntimeError("the two GPUs do not reach each other")
        memory, event = self.shared[number]
        return (torch.zeros_like(memory), event) if self.broken == "other" else (memory, event)

    def forget(self, handles):
        del self.shared[handles[0][0]]


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    monkeypatch.setattr(nccl, "_group", Group)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    made = Calls(monkeypatch)
    yield made
    assert made.pinned == {}
    assert made.shared == {}


@pytest.mark.promise(
    "GPUs", "Two workers with a GPU each exchange tensors through memory that both were seen to share."
)
@pytest.mark.parametrize("size", [3, 1 << 18])
@pytest.mark.parametrize("transport", [*ON_DEVICE, "connection"])
def test_what_a_lane_makes_arrives_where_another_lane_reads_it(transport, size):
    one, two = emu.Stream(), emu.Stream()
    with joined(transport=transport, device=DEVICE) as pair:
        for task in range(8):
            with emu.stream(one):
                made = torch.full((2, size), float(task), device=DEVICE)
                pair.out.send(message(task, made, made.t(), torch.tensor(task), ready=record(one)))
            del made
            received = pair.inbox.take(wait=False)
            assert (received.ready is None) == (transport == "connection")
            if received.ready is not None:
                two.wait_event(received.ready)
            *large, number = received.tensors
            with emu.stream(two):  # As a copy task.
                for tensor, shape in zip(large, ((2, size), (size, 2)), strict=True):
                    assert tensor.device.type == ("cpu" if transport == "connection" else "emu")
                    assert tensor.shape == shape
                    assert (tensor * 2).cpu().unique().tolist() == [2.0 * task]
                    tensor.record_stream(two)
                assert int(number) == task
            del received, tensor, large


@pytest.mark.promise(
    "GPUs", "Two workers with a GPU each exchange tensors through memory that both were seen to share."
)
@pytest.mark.parametrize("transport", ON_DEVICE[:2])
def test_what_is_read_on_the_way_is_not_used_again(transport):
    """Neither what was sent, which goes at once, nor the slot, while the receiver's copy out of it does not end."""
    one = emu.Stream()
    with joined(transport=transport, device=DEVICE) as pair, ExitStack() as held:
        stream, slots = pair.into._payload._stream.stream, []
        place = pair.out._payload.place
        pair.out._payload.place = lambda *arguments: slots.append(place(*arguments)) or slots[-1]

        def send(task):
            with emu.stream(one):
                pair.out.send(message(task, torch.full((1 << 18,), float(task), device=DEVICE), ready=record(one)))
            return pair.inbox.take(wait=False)

        send(0)
        ended = held.enter_context(emu.hold(stream))
        under_way = [send(task) for task in range(1, 12)]
        ended.set()
        for task, received in enumerate(under_way, 1):
            received.ready.synchronize()
            assert received.tensors[0].cpu().unique().tolist() == [task]
        assert len(set(slots[1:])) == 11
        for task in range(12, 20):
            send(task).ready.synchronize()
        assert len(set(slots)) <= 12 + pair.into._payload.freed_together


@pytest.mark.parametrize("transport", ON_DEVICE)
def test_messages_of_all_sizes_and_old_epochs(transport, calls):
    """A larger slot replaces a smaller one; what nobody takes comes back."""
    one = emu.Stream()
    sizes = [10, 1 << 19, 3, 1 << 20, 0, 77, 1 << 20, 5] * 3
    with joined(transport=transport, device=DEVICE, window=3) as pair:
        for step in range(6):
            if step == 4:
                for each in pair.edges:
                    each.advance(1)
            for size in sizes[step : step + 7]:
                with emu.stream(one):
                    made = torch.full((size,), float(size), device=DEVICE)
                    pair.out.send(message(size, made, None, ready=record(one), epoch=1 if step >= 3 else 0))
                if step != 3:
                    (received, nothing) = pair.inbox.take().tensors
                    assert nothing is None
                    assert received.cpu().tolist() == [float(size)] * size
            if step == 3:
                assert pair.inbox.empty
                for each in pair.edges:
                    each.advance(1)
                assert pair.inbox.tasks(7) == sizes[3:10] or transport == "nccl"
        if transport == "shared_memory":
            assert len(calls.shared) <= 2 * 4


@pytest.mark.promise(
    "GPUs", "Two workers with a GPU each exchange tensors through memory that both were seen to share."
)
@pytest.mark.parametrize("broken", ["", "share", "open", "other"])
def test_where_gpus_share_nothing_tensors_pass_through_pinned_memory(calls, caplog, broken):
    """It is found out while the edge is made, and said."""
    calls.broken = broken
    with caplog.at_level(logging.WARNING), joined(transport="shared_memory", device=DEVICE) as pair:
        ends = type(pair.out._payload), type(pair.into._payload)
        made = torch.full((1 << 16,), 7.0, device=DEVICE)
        pair.out.send(message(1, made, ready=record(emu.current_stream())))
        (received,) = pair.inbox.take().tensors
        assert received.cpu().unique().tolist() == [7.0]
        # One mapping is pinned at each end.
        assert len(calls.pinned) == (2 if broken else 0)
    assert ends == ((SharedMemoryOut, SharedMemoryIn) if broken else (CudaMemoryOut, CudaMemoryIn))
    assert ("share no memory of a GPU" in caplog.text) == bool(broken)


def test_a_worker_without_an_accelerator(calls):
    """Its end is as between two CPUs, the other one is pinned."""
    from edge_helpers import BOTH, Inbox, connect_in, folder
    from thread_helpers import run_all

    inboxes = [Inbox(), Inbox()]
    with folder() as name:
        connects = [
            lambda me=me: connect_in(
                name,
                me,
                BOTH,
                on_message=inboxes[me].on_message,
                on_broken=inboxes[me].on_broken,
                device=DEVICE if me else None,
            )
            for me in (0, 1)
        ]
        host, accelerator = run_all(*connects)
    sent = torch.arange(1e5)
    host.out[1].send(message(1, sent))
    (there,) = inboxes[1].take().tensors
    accelerator.out[0].send(message(2, there, ready=record(emu.current_stream())))
    (back,) = inboxes[0].take().tensors
    assert (there.device.type, back.device.type) == ("emu", "cpu")
    assert torch.equal(back, sent)
    assert len(calls.pinned) == 2
    del there
    for each in (host, accelerator):
        each.close()


def test_a_task_waits_for_what_its_edge_brings():
    """Until it has run. Private names, since only worker processes have parts of steps."""
    graph = lower(GPipeSchedule(), Shape(2, 2, 2), devices=["emu:0", "emu:0#1"])
    cut, tensors, lane, edge = part(graph, ["emu:0#1"]), StepTensors(), emu.Stream(), emu.Stream()
    crossings = Crossings(graph, cut, tensors, None, None, None)
    (task, dependency), gate = next(iter(cut.arrivals.items()))
    ready, own = record(edge), cut.graph.gates[gate]
    packet = Packet((torch.ones(3),))
    crossings.arrived(task, dependency, packet.shell(), packet.tensors, (lambda: None, ready))
    binder = SimpleNamespace(_timings={}, _graph=cut.graph, _crossings=crossings, _gates=(), _tensors=tensors)
    for waits in ([ready], []):
        stream = SimpleNamespace(wait=lane.wait_event)
        lane.waited.clear()
        Binder._await_dependencies(binder, cut.graph.tasks[own], stream)
        assert lane.waited == waits
        crossings.left(own, None)
