"""How workers of several machines find each other: who is let in, who is not, and how those are named that are gone."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from edge_helpers import SECONDS, SECRET, Inbox, message, nothing_left
from thread_helpers import Threads, run_all

from asyncpipe.errors import EdgeError
from asyncpipe.ops.edges.connect import Edges, connect
from asyncpipe.runtime.workers import entrance, tcp
from asyncpipe.runtime.workers.door import Door
from asyncpipe.runtime.workers.launcher import Address
from asyncpipe.runtime.workers.meeting import meet
from asyncpipe.secured import Secured

HERE = "127.0.0.1"
PAIR = (0, 1)
NEW_NETWORK = 0x40000000
"""``CLONE_NEWNET`` of Linux."""


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    with nothing_left():
        yield


def remote(door: Door) -> dict[int, Address]:
    assert door.remote is not None
    return {1: door.remote}


def begin(me: int, door: Door, addresses: dict[int, Address], **options: Any) -> dict[tuple[int, int], Secured]:
    options = {"job": "job", "secret": SECRET, "timeout": SECONDS} | options
    return meet(me, [PAIR], door, addresses, **options)


def raised(function: Callable[[], object]) -> EdgeError:
    with pytest.raises(EdgeError) as caught:
        function()
    return caught.value


@pytest.mark.parametrize("host", [HERE, "::1"])
def test_two_machines_meet_by_tcp(host: str) -> None:
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("there is no IPv6")
    doors = [Door(0), Door(1, host=host)]
    there = remote(doors[1])
    found = run_all(lambda: begin(0, doors[0], there), lambda: begin(1, doors[1], {}))
    sender, receiver = (each[PAIR].socket for each in found)
    for each in (sender, receiver):
        each.setblocking(True)
        assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == tcp.BLOCKED_SECONDS * 1000
    sender.sendall(b"what the edge begins with")
    assert receiver.recv(100) == b"what the edge begins with"
    for each in (sender, receiver):
        each.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(there[1])  # type: ignore[arg-type] # The door is closed.


def test_who_does_not_know_the_secret_is_not_let_in(caplog: pytest.LogCaptureFixture) -> None:
    door = Door(1, host=HERE)
    there = remote(door)
    stranger, receiver = run_all(
        lambda: raised(lambda: begin(0, Door(0), there, secret=b"another")),
        lambda: raised(lambda: begin(1, door, {}, timeout=0.5)),
    )
    assert str(stranger) == "worker 1 went away while edges were connected: the connection was closed"
    assert str(receiver) == "worker 0 did not come within 0.5 s; waiting for the edges 0 > 1"
    assert caplog.messages == ["a connection to worker 1 is refused: it does not know the secret"]


def test_what_does_not_know_the_secret_is_told_nothing() -> None:
    """Somebody else is at a worker's address: it gets a challenge's answer, and no greeting."""
    with socket.create_server((HERE, 0)) as listener:
        sender = Threads(lambda: raised(lambda: begin(0, Door(0), {1: listener.getsockname()})))
        with listener.accept()[0] as connected:
            connected.sendall(b"asyncpipe workers 2\n" + bytes(32))
            assert len(connected.recv(1000)) == 16 + 32 + 32
            connected.sendall(bytes(32))
            assert connected.recv(1000) == b""
        (error,) = sender.join()
    assert str(error).startswith("what answers at ('127.0.0.1', ")
    assert str(error).endswith("is not worker 1: the controller does not know the secret")
    assert error.peers == (1,)


def test_strangers_that_say_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "MOST_STRANGERS", 3)
    door = Door(1, host=HERE)
    there = remote(door)
    receiver = Threads(lambda: begin(1, door, {}))
    strangers = [socket.create_connection(there[1]) for _ in range(8)]  # type: ignore[arg-type]
    found = [begin(0, Door(0), there), *receiver.join()]
    for each in (*strangers, *(each[PAIR].socket for each in found)):
        each.close()


def test_a_stranger_that_says_nothing_is_shown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "HANDSHAKE_SECONDS", 0.05)
    door = Door(1, host=HERE)
    there = remote(door)
    receiver = Threads(lambda: begin(1, door, {}))
    with socket.create_connection(there[1]) as stranger:  # type: ignore[arg-type]
        stranger.settimeout(SECONDS)
        while stranger.recv(100):
            pass
    monkeypatch.undo()
    for each in (begin(0, Door(0), there), *receiver.join()):
        each[PAIR].socket.close()


def test_who_cannot_be_reached_is_named_with_the_reason() -> None:
    with socket.create_server((HERE, 0)) as nobody:
        address = nobody.getsockname()
    error = raised(lambda: begin(0, Door(0), {1: address}, timeout=0.1))
    assert str(error) == (
        "worker 1 did not come within 0.1 s; waiting for the edges 0 > 1; the last try: [Errno 111] Connection refused"
    )


class Host:
    """A thread with a network of its own, with one cable."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.inbox = Inbox()
        self.edges: Edges | None = None
        self.tid = 0
        self._libc = ctypes.CDLL(None)

    def leave(self) -> bool:
        """Have a network of its own, in this thread; whether that is allowed."""
        self.tid = threading.get_native_id()
        return not self._libc.unshare(NEW_NETWORK)

    def plug(self, name: str) -> None:
        ip("addr", "add", f"{self.address}/24", "dev", name)
        ip("link", "set", name, "up")

    def join(self, me: int, door: Door, addresses: dict[int, Address]) -> None:
        sockets = begin(me, door, addresses)
        self.edges = connect(
            me, sockets, transport="connection", on_message=self.inbox.on_message, on_broken=self.inbox.on_broken
        )


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def test_a_host_whose_cable_is_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody closes anything; both ends notice, whether they wait to send or to receive."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("only root can pull a cable, with ip")
    for name, seconds in {"GONE_SECONDS": 2, "BLOCKED_SECONDS": 2, "IDLE_SECONDS": 1, "BETWEEN_SECONDS": 1}.items():
        monkeypatch.setattr(tcp, name, seconds)
    hosts = Host("10.77.0.1"), Host("10.77.0.2")
    stages = [threading.Barrier(2, timeout=SECONDS) for _ in range(4)]
    doors: list[Door] = []

    def run(me: int) -> object:
        host = hosts[me]
        if not host.leave():
            stages[0].abort()
            return None
        stages[0].wait()
        if me == 0:
            ip("link", "add", "cable0", "type", "veth", "peer", "name", "cable1", "netns", str(hosts[1].tid))
        stages[1].wait()
        host.plug(f"cable{me}")
        if me == 1:
            doors.append(Door(1, host=host.address))
        stages[2].wait()
        host.join(me, doors[0] if me else Door(0), {} if me else remote(doors[0]))
        assert host.edges is not None
        if me == 0:
            host.edges.out[1].send(message(1))
        else:
            assert host.inbox.take().header.task == 1
        stages[3].wait()
        if me == 0:
            ip("link", "set", "cable0", "down")
            # Too large to go with its header: what waits for the transport notices as well.
            host.edges.out[1].send(message(2, torch.zeros(1 << 19)))
        error = host.inbox.error()
        host.edges.close()
        return error

    found = run_all(*[partial(run, me) for me in (0, 1)])
    if None in found:
        pytest.skip("this process may have no network of its own")
    for error in found:
        assert isinstance(error, EdgeError), error
        assert error.edge == PAIR
        assert isinstance(error.__cause__, OSError)
