"""Edges as their users see them: what is sent arrives, in order; credits, epochs, ends. Both ends are in here."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
import torch
from edge_helpers import SECONDS, Inbox, Joined, joined, message, nothing_left, same
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_helpers import Threads, run_all
from torch import Tensor

from asyncpipe.errors import ArgumentTypeError, EdgeError, OptionError
from asyncpipe.ops.edges import channel, edge_in, edge_out
from asyncpipe.ops.edges.connect import HOST_TRANSPORTS, TRANSPORTS
from asyncpipe.ops.edges.message import EdgeMessage

transports = pytest.mark.parametrize("transport", HOST_TRANSPORTS)
all_transports = pytest.mark.parametrize("transport", TRANSPORTS)

DTYPES = """
    bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64
    float8_e4m3fn float8_e5m2 complex64 complex128
""".split()
LARGE = (1 << 18) + 24
"""Bytes: more than the thread that sends may copy."""


class Recipe(NamedTuple):
    """A tensor."""

    kind: str
    dtype: str
    shape: list[int]
    seed: int

    def make(self) -> Tensor | None:
        dtype = getattr(torch, self.dtype)
        if self.kind == "none":
            return None
        if self.kind == "large":
            return _values([LARGE // dtype.itemsize], dtype, self.seed)
        if self.kind == "conjugate":
            return _values(self.shape, torch.complex64, self.seed).conj()
        if self.kind == "negative":
            return _values(self.shape, torch.complex64, self.seed).conj().imag
        tensor = _values(self.shape, dtype, self.seed)
        if self.kind == "transposed" and tensor.dim() > 1:
            return tensor.transpose(0, -1)
        if self.kind == "sliced" and tensor.dim():
            return tensor[::2]
        if self.kind == "expanded":
            return tensor[None].expand(3, *tensor.shape)
        return tensor


def _values(shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Bits of any kind, but for booleans."""
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.uint8).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


recipes = st.builds(
    Recipe,
    st.sampled_from(["none", "plain", "transposed", "sliced", "expanded", "conjugate", "negative", "large"]),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 9), max_size=4),
    st.integers(0, 2**16),
)
messages = st.lists(
    st.tuples(st.integers(0, 2**40), st.lists(recipes, max_size=6), st.sampled_from([0, 1, 1000, 70_000])), max_size=12
)


def made(drawn: Sequence[tuple[int, list[Recipe], int]]) -> list[EdgeMessage]:
    return [message(task, *[each.make() for each in values], meta=b"m" * meta) for task, values, meta in drawn]


@pytest.fixture(scope="module", params=TRANSPORTS)
def lasting(request: pytest.FixtureRequest) -> Iterator[Joined]:
    """One pair of workers for all examples of a property, so that each begins where others have ended."""
    with joined(transport=request.param, window=8) as pair:
        yield pair


@settings(max_examples=30)
@given(messages, messages, st.booleans())
def test_what_is_sent_arrives_in_order(lasting: Joined, there: list[Any], back: list[Any], keep: bool) -> None:
    def send(worker: int, sent: list[EdgeMessage]) -> None:
        for each in sent:
            lasting.edges[worker].out[1 - worker].send(each)

    def receive(worker: int, sent: list[EdgeMessage]) -> None:
        received = []
        for each in sent:
            received.append(lasting.inboxes[worker].take())
            assert same(received[-1], each)
            if not keep:
                received.clear()
        # The memory of those that are kept is their own.
        assert all(map(same, received, sent))

    to, fro = made(there), made(back)
    workers = [(send, 0, to), (send, 1, fro), (receive, 0, fro), (receive, 1, to)]
    assert run_all(*[lambda work=work: work[0](*work[1:]) for work in workers]) == [None] * 4
    assert all(inbox.empty for inbox in lasting.inboxes)


@transports
def test_memory_keeps_the_order_of_its_dimensions(transport: str) -> None:
    image = torch.randn(2, 3, 40, 50).to(memory_format=torch.channels_last)
    with joined(transport=transport) as pair:
        for sent in (image, image[:, :, :4, :4], image[:1, :, :4, :4].contiguous(memory_format=torch.channels_last)):
            pair.out.send(message(1, sent))
            (received,) = pair.inbox.take().tensors
            assert torch.equal(received, sent)
            whole = sent.numel() * sent.itemsize == sent.untyped_storage().nbytes()
            assert received.stride() == (sent.stride() if whole else sent.contiguous().stride())


@transports
def test_received_tensors_are_their_owners_own(transport: str) -> None:
    with joined(transport=transport) as pair:
        for size in (3, 3000, LARGE):
            sent = torch.zeros(2, size)
            pair.out.send(message(1, sent[0], sent[1]))
            a, b = pair.inbox.take().tensors
            version = b._version
            a.requires_grad_().detach().add_(1)
            assert (sent.any(), b.any(), b._version, a._base, b._base) == (False, False, version, None, None)


@transports
def test_each_threads_order_is_kept(transport: str) -> None:
    def send(sender: int) -> None:
        for each in range(200):
            # Some large ones, so that some are sent by the edge's thread.
            pair.out.send(message(sender * 1000 + each, torch.zeros(LARGE if each % 50 == 0 else 8, dtype=torch.uint8)))

    with joined(transport=transport) as pair:
        threads = Threads(*[lambda sender=sender: send(sender) for sender in range(4)])
        tasks = pair.inbox.tasks(800)
        assert threads.join() == [None] * 4
    for sender in range(4):
        assert [task for task in tasks if task // 1000 == sender] == [sender * 1000 + each for each in range(200)]


# Credits


@transports
def test_a_receiver_holds_at_most_its_window(transport: str) -> None:
    with joined(transport=transport, window=3) as pair:
        for task in range(10):
            pair.out.send(message(task, torch.zeros(2000)))
        held = [pair.inbox.take(release=False) for _ in range(3)]
        for task in range(3, 10):
            assert (pair.out.traffic().messages, len(pair.into.held)) == (task, 3)
            assert pair.inbox.empty
            released = held.pop(0)
            released.release()
            released.release()  # Twice is once.
            held.append(pair.inbox.take(release=False))
        assert [each.header.task for each in held] == [7, 8, 9]
        assert pair.out.traffic().waited_seconds > 0


@transports
def test_a_window_can_grow_and_shrink(transport: str) -> None:
    with joined(transport=transport, window=1) as pair:
        for task in range(9):
            pair.out.send(message(task))
        held = [pair.inbox.take(release=False)]
        pair.into.set_window(5)
        held += [pair.inbox.take(release=False) for _ in range(4)]
        pair.into.set_window(2)
        for each in held[:3]:
            each.release()
        assert pair.out.traffic().messages == 5
        held[3].release()
        assert pair.inbox.take(release=False).header.task == 5
        with pytest.raises(OptionError, match="window must be a positive integer, got 0"):
            pair.into.set_window(0)


@transports
def test_large_messages_cross(transport: str) -> None:
    large = torch.arange(1 << 22)

    def exchange(worker: int) -> bool:
        for task in range(3):
            pair.edges[worker].out[1 - worker].send(message(task, large, large[1:]))
        received = [pair.inboxes[worker].take() for _ in range(3)]
        return all(torch.equal(each.tensors[0], large) and torch.equal(each.tensors[1], large[1:]) for each in received)

    with joined(transport=transport, window=2) as pair:
        assert run_all(lambda: exchange(0), lambda: exchange(1)) == [True, True]


@all_transports
def test_sending_does_not_wait_for_a_receiver_that_is_busy(transport: str) -> None:
    inboxes = [Inbox(), Inbox()]
    go_on = threading.Event()
    take = inboxes[1].on_message
    inboxes[1].on_message = lambda each: go_on.wait(SECONDS) and take(each)
    with joined(transport=transport, window=1000, inboxes=inboxes) as pair:
        for task in range(1000):
            pair.out.send(message(task, torch.zeros(1000), meta=b"%d" % task))
        pair.out.send(message(1000, torch.zeros(LARGE)))
        go_on.set()
        assert pair.inbox.tasks(1001) == list(range(1001))


# Epochs


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(-2, 3), max_size=6), max_size=6))
def test_messages_of_old_epochs_are_dropped_and_new_ones_kept(lasting: Joined, batches: list[list[int]]) -> None:
    """Each batch has messages of epochs around the receiver's, which then advances by one."""
    edge = lasting.into
    epoch = getattr(lasting, "epoch", 0)
    early: list[tuple[int, int]] = []
    edge.set_window(100)
    for number, batch in enumerate([*batches, [], [], []]):
        expected = []
        for task, ahead in enumerate(batch):
            lasting.out.send(message(task, torch.zeros(9), epoch=max(0, epoch + ahead)))
            if ahead > 0:
                early.append((epoch + ahead, task))
            elif ahead == 0 or epoch + ahead < 0:
                expected.append(task)
        # The last of the batch is delivered: then all before it have been dealt with.
        lasting.out.send(message(99, epoch=epoch))
        assert lasting.inbox.tasks(len(expected) + 1) == [*expected, 99], number
        assert len(edge.held) == len(early)
        epoch += 1
        lasting.edges[1].advance(epoch)
        lasting.epoch = epoch
        now = [task for of, task in early if of == epoch]
        early = [each for each in early if each[0] > epoch]
        assert lasting.inbox.tasks(len(now)) == now
    assert lasting.inbox.empty


@all_transports
def test_an_abort_returns_the_credits_of_what_was_not_taken(transport: str) -> None:
    with joined(transport=transport, window=2) as pair:
        for task in range(6):
            pair.out.send(message(task))
        old = [pair.inbox.take(release=False) for _ in range(2)]
        pair.edges[0].advance(1)  # What is queued there is dropped.
        pair.edges[1].advance(1)
        for task in range(10, 14):
            pair.out.send(message(task, epoch=1))
        assert pair.inbox.tasks(4) == [10, 11, 12, 13]
        for each in old:
            each.release()
        assert not pair.into.held
        pair.out.send(message(14, epoch=0))
        pair.out.send(message(15, epoch=1))
        assert pair.inbox.tasks(1) == [15]


# Devices


class Event:
    """An event of a device whose work ends when the test says so."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.asked = threading.Event()

    def synchronize(self) -> None:
        self.asked.set()
        assert self.done.wait(SECONDS)


@transports
def test_nothing_is_sent_before_the_device_has_made_it(transport: str) -> None:
    ready = Event()
    tensor = torch.zeros(3)
    with joined(transport=transport) as pair:
        pair.out.send(message(1, tensor, ready=ready))
        pair.out.send(message(2))
        assert ready.asked.wait(SECONDS)
        assert pair.out.traffic().messages == 0
        tensor.fill_(1)
        ready.done.set()
        first, second = pair.inbox.take(), pair.inbox.take()
        assert (first.tensors[0].tolist(), second.header.task) == ([1, 1, 1], 2)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (
            torch.eye(2).to_sparse(),
            "no sparse, nested, quantized or meta ones; got one of torch.float32, torch.sparse_coo",
        ),
        (torch.empty(2, device="meta"), "torch.strided on meta"),
        (torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged), "torch.jagged"),
    ],
)
def test_what_edges_do_not_carry(lasting: Joined, tensor: Tensor, says: str) -> None:
    with pytest.raises(ArgumentTypeError, match=says):
        lasting.out.send(message(1, tensor))


# Ends


@all_transports
def test_nothing_is_left(transport: str) -> None:
    with nothing_left():
        with joined(transport=transport) as pair:
            pair.out.send(message(1, torch.zeros(LARGE), torch.zeros(3)))
            kept = pair.inbox.take().tensors
        # What has arrived outlives the edges.
        assert not any(each.any() for each in kept)
        kept[0].add_(1)
        pair.edges[0].close()  # Twice is once.
        with pytest.raises(EdgeError, match="the edge 0 > 1 is closed"):
            pair.out.send(message(2))
        assert all(inbox.empty for inbox in pair.inboxes)  # Nobody calls it broken.
        del pair, kept


@all_transports
def test_what_was_sent_before_the_end_arrives(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # However busy the machine is.
    monkeypatch.setattr(edge_out, "LAST_SECONDS", SECONDS)
    monkeypatch.setattr(channel, "ABORT_SECONDS", SECONDS)
    with joined(transport=transport) as pair:
        pair.out.send(message())
        pair.inbox.take()  # There is credit.
        for task in range(20):
            pair.out.send(message(task, torch.zeros(LARGE if task == 10 else 10)))
        pair.edges[0].close()
        assert pair.inbox.tasks(20) == list(range(20))


@transports
def test_closing_while_a_message_waits_for_credit(transport: str) -> None:
    with nothing_left(), joined(transport=transport, window=1) as pair:
        for task in range(5):
            pair.out.send(message(task, torch.zeros(LARGE)))
        assert pair.inbox.take(release=False).header.task == 0
        pair.edges[0].close()
        assert pair.out.traffic().messages == 1
        assert pair.inbox.empty


@transports
def test_after_the_receiver_has_closed_messages_are_dropped(transport: str) -> None:
    with joined(transport=transport) as pair:
        pair.edges[1].close()
        out = pair.out
        for task in range(200):
            out.send(message(task, torch.zeros(1000)))
    assert all(inbox.empty for inbox in pair.inboxes)
    assert pair.out.traffic().messages < 200


@transports
def test_what_on_message_raises_breaks_the_edge(transport: str) -> None:
    inboxes = [Inbox(), Inbox()]
    inboxes[1].on_message = lambda each: 1 // each.header.task
    with joined(transport=transport, inboxes=inboxes) as pair:
        pair.out.send(message(0))
        error = inboxes[1].error()
        assert (str(error), error.peers) == (
            "the edge 0 > 1 to worker 0 broke: ZeroDivisionError: integer division or modulo by zero",
            (0,),
        )
        assert isinstance(error.__cause__, ZeroDivisionError)


# Others take what has come


def test_others_take_messages_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the thread that calls, as they come; tensors in the message, in memory and of new layouts."""
    monkeypatch.setattr(edge_in, "LEFT_SECONDS", 1000.0)
    threads: list[int] = []
    inboxes = [Inbox(), Inbox()]
    put = inboxes[1].on_message
    inboxes[1].on_message = lambda each: (put(each), threads.append(threading.get_ident()))
    # More than a channel's buffer has room for.
    meta = bytes(300_000)
    sent = [
        message(task, torch.full((size,), task), meta=meta if task == 3 else b"")
        for task, size in enumerate([0, 10, 5000, 10, 100_000, 5000])
    ]
    with joined(shared=True, window=64, inboxes=inboxes) as pair:
        assert pair.into.is_shared
        for each in sent:
            pair.out.send(each)
        while len(threads) < len(sent):
            assert select.select([pair.into.descriptor], [], [], SECONDS)[0]
            assert pair.into.take()
        assert set(threads) == {threading.get_ident()}
        assert all(same(pair.inbox.take(), each) for each in sent)
        pair.edges[0].close()
        assert not taken_to_the_end(pair)


def taken_to_the_end(pair: Joined) -> bool:
    while pair.into.take():
        with suppress(OSError, ValueError):  # Its thread has closed it meanwhile.
            select.select([pair.into.descriptor], [], [], SECONDS)
    return False
