"""How workers find each other, and what they say of those that do not come."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from edge_helpers import SECRET, Inbox, connect_in, folder, message, nothing_left
from thread_helpers import Threads, run_all

from asyncpipe.errors import EdgeError, OptionError
from asyncpipe.ops.edges.connect import TRANSPORTS, Edges, connect
from asyncpipe.runtime.workers.handshake import introduce, let_in
from asyncpipe.secured import Macs, Secured


@pytest.fixture
def place() -> Iterator[str]:
    with nothing_left(), folder() as name:
        yield name


def begin(me: int, pairs: list[tuple[int, int]], place: str, *, inbox: Inbox | None = None, **options: Any) -> Edges:
    inbox = inbox or Inbox()
    options = {"timeout": 10.0} | options
    return connect_in(place, me, pairs, on_message=inbox.on_message, on_broken=inbox.on_broken, **options)


def test_a_ring_of_workers_with_shortcuts(place: str) -> None:
    """No order of the pairs makes the workers wait for each other."""
    pairs = [(0, 1), (1, 2), (2, 3), (3, 0), (1, 0), (0, 2), (3, 1)]
    inboxes = [Inbox() for _ in range(4)]
    edges = run_all(*[lambda me=me: begin(me, pairs, place, inbox=inboxes[me]) for me in range(4)])
    assert [(sorted(each.out), sorted(each.into)) for each in edges] == [
        ([1, 2], [1, 3]),
        ([0, 2], [0, 3]),
        ([3], [0, 1]),
        ([0, 1], [2]),
    ]
    for sender, receiver in pairs:
        edges[sender].out[receiver].send(message(sender))
    for receiver, inbox in enumerate(inboxes):
        senders = sorted(each for each, to in pairs if to == receiver)
        received = sorted((inbox.take() for _ in senders), key=lambda each: each.sender)
        assert [(each.sender, each.header.task) for each in received] == [(each, each) for each in senders]
    for each in edges:
        each.close()


def test_only_those_are_named_that_have_not_come(place: str) -> None:
    pairs = [(0, 1), (0, 3), (1, 0), (2, 0)]
    one, none = run_all(lambda: begin(1, pairs, place), lambda: raised(lambda: begin(0, pairs, place, timeout=0.5)))
    assert none.peers == (2, 3)
    assert str(none) == "worker 2, worker 3 did not come within 0.5 s; waiting for the edges 0 > 3, 2 > 0"
    if isinstance(one, Edges):  # It had what it waited for, and sees the other one go.
        one.close()


async def let_in_blocking(connected: socket.socket) -> None:
    connected.setblocking(False)
    await let_in(connected, SECRET)
    connected.setblocking(True)


def raised(function: Any) -> EdgeError:
    with pytest.raises(EdgeError) as caught:
        function()
    return caught.value


def test_a_worker_of_another_job(place: str) -> None:
    other, this = run_all(
        lambda: raised(lambda: begin(0, [(0, 1)], place, job="another", timeout=5)),
        lambda: raised(lambda: begin(1, [(0, 1)], place, timeout=0.5)),
    )
    assert str(other) == "worker 1 refuses the edge from worker 0: worker 1 is of job 'job' and version 3"
    assert this.peers == (0,)


def test_a_worker_that_goes_away_while_it_is_greeted(place: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{place}/1")
        listener.listen()
        caller = Threads(lambda: raised(lambda: begin(0, [(0, 1)], place)))
        listener.accept()[0].close()
        (error,) = caller.join()
    os.unlink(f"{place}/1")
    assert str(error).startswith("worker 1 went away while edges were connected: ")
    assert error.peers == (1,)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("leaves", [True, False])
def test_a_worker_that_does_not_make_the_edge(place: str, transport: str, leaves: bool) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{place}/1")
        listener.listen()
        timeout = 10.0 if leaves else 1.0  # Of which the meeting needs some on a busy machine.
        caller = Threads(lambda: raised(lambda: begin(0, [(0, 1)], place, transport=transport, timeout=timeout)))
        with listener.accept()[0] as connection:
            asyncio.run(let_in_blocking(connection))
            connection.recv(1000)
            connection.sendall(b"\x0f\0\0\0" + b'{"error": null}')
            if not leaves:
                (error,) = caller.join()
        if leaves:
            (error,) = caller.join()
    os.unlink(f"{place}/1")
    says = "worker 1 went away while" if leaves else "worker 1 did not come within 1 s; waiting for the edges 0 > 1"
    assert str(error).startswith(says)
    assert error.peers == (1,)


def test_a_stranger_at_the_door(place: str) -> None:
    """Whoever is no worker is shown out, and others come in."""
    receiver = Threads(lambda: begin(1, [(0, 1)], place))
    knows = (b"\xff\xff\xff\xff", b"\x02\0\0\0[]", b"\x02\0\0\0{}")
    for is_known, said in ((False, b""), (False, bytes(500)), *((True, each) for each in knows)):
        with socket.socket(socket.AF_UNIX) as stranger:
            while stranger.connect_ex(f"{place}/1"):
                pass
            if is_known:
                stranger.setblocking(False)
                asyncio.run(introduce(stranger, SECRET, bytes(16)))
                stranger.setblocking(True)
            stranger.sendall(said)
    sender = begin(0, [(0, 1)], place)
    for each in (sender, *receiver.join()):
        each.close()


@pytest.mark.parametrize(
    ("pair", "options", "says"),
    [
        ((0, 0), {}, "worker 0 cannot have an edge from worker 0 to worker 0"),
        ((-1, 0), {}, "worker 0 cannot have an edge from worker -1 to worker 0"),
        ((1, 2), {}, "worker 0 cannot have an edge from worker 1 to worker 2"),
        ((0, 1), {"transport": "pigeon"}, "transport must be one of 'shared_memory'.*, got 'pigeon'"),
        ((1, 0), {"window": 0}, "window must be a positive integer, got 0"),
    ],
)
def test_wrong_arguments(pair: tuple[int, int], options: dict[str, Any], says: str) -> None:
    with nothing_left():
        inbox, sockets = Inbox(), socket.socketpair()
        with pytest.raises(OptionError, match=says):
            connect(0, {pair: Secured(sockets[0])}, on_message=inbox.on_message, on_broken=inbox.on_broken, **options)
        sockets[1].close()


@pytest.mark.promise("Security", "An edge over TCP without keys is refused.")
@pytest.mark.parametrize(
    ("macs", "says"), [(Macs(b"", b""), "use connection"), (None, "by TCP without keys for its MACs")]
)
def test_what_edges_between_machines_cannot_be(macs: Macs | None, says: str) -> None:
    inbox = Inbox()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        with pytest.raises(OptionError, match=says):
            connect(0, {(0, 1): Secured(here, macs)}, on_message=inbox.on_message, on_broken=inbox.on_broken)
    assert here.fileno() == -1
