"""What is on the socket, seen by a peer that speaks it by hand; and a peer that speaks something else."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
from edge_helpers import SECONDS, Inbox, nothing_left

from asyncpipe.ops.edges.channel import EdgeChannel
from asyncpipe.ops.edges.edge_in import EdgeIn
from asyncpipe.ops.edges.edge_out import EdgeOut
from asyncpipe.ops.edges.message import MessageLayout, layout_of
from asyncpipe.ops.edges.shared_memory import SharedMemoryIn, SharedMemoryOut
from asyncpipe.ops.edges.wire import HEADER_SIZE, INLINE, EdgeFrameKind, Frame, encode_credit
from asyncpipe.shared_memory import new_memory


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The peer's end, and this one's."""
    with nothing_left():
        theirs, ours = socket.socketpair()
        theirs.settimeout(SECONDS)
        yield theirs, ours
        theirs.close()


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


Side = TypeVar("Side")


def payload(side: Callable[[int], Side]) -> Side:
    """One side of the transport, with memory of its own."""
    descriptor = new_memory("asyncpipe-edge")
    try:
        return side(descriptor)
    finally:
        os.close(descriptor)


@pytest.fixture
def sender(ends: tuple[socket.socket, socket.socket], inbox: Inbox) -> Iterator[EdgeOut]:
    edge = EdgeOut(0, 1, EdgeChannel(ends[1]), payload(SharedMemoryOut), inbox.on_broken)
    edge.start()
    yield edge
    edge.close()


@pytest.fixture
def receiver(ends: tuple[socket.socket, socket.socket], inbox: Inbox) -> Iterator[EdgeIn]:
    edge = EdgeIn(0, 1, EdgeChannel(ends[1]), payload(SharedMemoryIn), 4, inbox.on_message, inbox.on_broken)
    edge.start()
    yield edge
    edge.close()


def read(peer: socket.socket, count: int) -> bytes:
    return peer.recv(count, socket.MSG_WAITALL)


def frame(peer: socket.socket) -> Frame:
    return Frame.decode(read(peer, HEADER_SIZE))


def test_a_layout_travels() -> None:
    layouts = (
        layout_of(torch.zeros(2, 3, dtype=torch.float8_e4m3fn)),
        None,
        layout_of(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        layout_of(torch.tensor(True)),
    )
    decoded = MessageLayout.decode(MessageLayout(b"\0meta", layouts).encode())
    assert (decoded.meta, decoded.tensors, decoded.sizes) == (b"\0meta", layouts, [6, 0, 480, 1])
    with pytest.raises(ValueError, match="of this worker has no type 'save'"):
        MessageLayout.decode(b"\x13\0\0\0" + b'[["save",[1],null]]')


MESSAGE = Frame(EdgeFrameKind.MESSAGE, 0, INLINE, 0, 0, 0, 0, 0)
LAYOUT_OF_ONE = Frame(EdgeFrameKind.LAYOUT, 0, size=24).encode() + b"\x14\0\0\0" + b'[["int32",[1],null]]'
LAYOUT = Frame(EdgeFrameKind.LAYOUT, 0, size=6).encode() + b"\x02\0\0\0[]"


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"", "EOFError: the other end has closed the connection"),
        (b"half a frame", "EOFError: the other end has closed the connection"),
        (Frame(77).encode(), "ValueError: a frame of unknown kind 77 came"),
        (MESSAGE.encode(), "KeyError: 0"),
        (LAYOUT + MESSAGE._replace(size=3).encode(), "ValueError: a message of 3 bytes came, and its layout has 0"),
        (LAYOUT + 5 * MESSAGE.encode(), "ValueError: a message came that is beyond the window of 4"),
        (
            LAYOUT_OF_ONE + MESSAGE._replace(slot=5, size=4).encode(),
            "ValueError: Place(start=256, size=64, number=0) is beyond the 0 bytes of shared memory",
        ),
    ],
)
def test_a_sender_that_speaks_something_else(
    ends: tuple[socket.socket, socket.socket], receiver: EdgeIn, inbox: Inbox, said: bytes, error: str
) -> None:
    ends[0].sendall(said)
    ends[0].shutdown(socket.SHUT_WR)
    assert str(inbox.error()) == f"the edge 1 > 0 to worker 1 broke: {error}"


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"", "EOFError: the other end has closed the connection"),
        (encode_credit(1, [3]), "KeyError: 3"),
    ],
)
def test_a_receiver_that_speaks_something_else(
    ends: tuple[socket.socket, socket.socket], sender: EdgeOut, inbox: Inbox, said: bytes, error: str
) -> None:
    ends[0].sendall(said)
    ends[0].shutdown(socket.SHUT_WR)
    assert str(inbox.error()) == f"the edge 0 > 1 to worker 1 broke: {error}"
