"""Who does not know the secret is not let in, and nothing that they send is unpickled."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from collections.abc import Callable
from contextlib import suppress

import pytest
from thread_helpers import Threads
from worker_helpers import SECONDS, Recorded, folders, until

from asyncpipe.runtime.workers import entrance
from asyncpipe.runtime.workers.handshake import RefusedError, introduce
from asyncpipe.runtime.workers.listener import ControlListener
from asyncpipe.secured import Secured

SECRET = b"s" * 32
WRONG = b"w" * 32
GREETING_AND_CHALLENGE = 20 + 32


def show(connected: socket.socket, secret: bytes, token: bytes) -> None:
    """``introduce``, on a thread without a loop."""
    connected.setblocking(False)
    asyncio.run(introduce(connected, secret, token))
    connected.settimeout(SECONDS)


class Bomb:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return os._exit, (99,)


def tcp(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, SECONDS)


def sends(data: bytes) -> Callable[[tuple[str, int], bytes], None]:
    def stranger(address: tuple[str, int], token: bytes) -> None:
        with tcp(address) as connected:
            assert len(connected.recv(GREETING_AND_CHALLENGE, socket.MSG_WAITALL)) == GREETING_AND_CHALLENGE
            connected.sendall(data)
            with suppress(ConnectionResetError):  # Not all that it sent was read.
                assert connected.recv(1) == b"", "it is told nothing, and is closed"

    return stranger


def guesses(address: tuple[str, int], token: bytes) -> None:
    """Knows the token, and not the secret."""
    with tcp(address) as connected, pytest.raises(ConnectionResetError, match="was closed"):
        show(connected, WRONG, token)


def goes(address: tuple[str, int], token: bytes) -> None:
    tcp(address).close()


def plays_back(address: tuple[str, int], token: bytes) -> None:
    """Has another connection of the controller answer its challenge, which it cannot, as that proves another thing."""
    with tcp(address) as connected, tcp(address) as other:
        challenge = connected.recv(GREETING_AND_CHALLENGE, socket.MSG_WAITALL)[-32:]
        other.recv(GREETING_AND_CHALLENGE, socket.MSG_WAITALL)
        other.sendall(token + challenge + bytes(32))
        assert other.recv(32) == b""
        connected.sendall(token + challenge + bytes(32))
        assert connected.recv(1) == b""


def comes_too_late(address: tuple[str, int], token: bytes) -> None:
    """Knows the secret, but is of an earlier start."""
    with tcp(address) as connected:
        show(connected, SECRET, bytes(16))
        assert connected.recv(1) == b""


@pytest.mark.parametrize(
    "stranger",
    [
        sends(b"GET / HTTP/1.1\r\n\r\n".ljust(200)),
        sends(pickle.dumps(Bomb()).ljust(80)),
        sends(os.urandom(1 << 16)),
        guesses,
        goes,
        plays_back,
        comes_too_late,
    ],
)
async def test_a_stranger_is_refused_and_the_worker_is_let_in(stranger):
    taken: list[Secured] = []
    listener = ControlListener(SECRET, ("127.0.0.1", 0))
    with listener.expecting(taken.append) as (address, token):
        assert not isinstance(address, str)
        visit = Threads(lambda: stranger(address, token))
        [error] = await asyncio.get_running_loop().run_in_executor(None, visit.join)
        assert error is None
        assert taken == []

        def worker() -> None:
            with tcp(address) as connected:
                show(connected, SECRET, token)

        visit = Threads(worker)
        [error] = await asyncio.get_running_loop().run_in_executor(None, visit.join)
        assert error is None
        await until("the worker is let in", lambda: taken)
        taken[0].socket.close()
    with pytest.raises(ConnectionRefusedError):
        tcp(address)


async def test_one_that_says_nothing_keeps_no_worker_out_and_is_closed(monkeypatch):
    monkeypatch.setattr(entrance, "HANDSHAKE_SECONDS", 0.05)
    listener = ControlListener(SECRET, ("127.0.0.1", 0))
    with listener.expecting(lambda connected: None) as (address, _):
        assert not isinstance(address, str)
        silent = [tcp(address) for _ in range(70)]
        for connected in silent:
            connected.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(SECONDS):
            for connected in silent:
                while await loop.sock_recv(connected, 100):
                    pass
                connected.close()


async def test_a_controller_that_does_not_know_the_secret_is_refused_by_the_worker():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.sendall(b"asyncpipe workers 2\n" + bytes(32) + bytes(32))
        with pytest.raises(RefusedError, match="does not know the secret"):
            await introduce(ours, SECRET, bytes(16))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.sendall(b"SSH-2.0-OpenSSH_9.6 and more")
        with pytest.raises(RefusedError, match="no controller of asyncpipe: it says b'SSH"):
            await introduce(ours, SECRET, bytes(16))


async def test_the_socket_is_in_a_folder_that_only_this_user_can_enter():
    seen = []
    listener = ControlListener(SECRET, None)
    with listener.expecting(lambda connected: None) as (first, _), listener.expecting(lambda connected: None) as again:
        assert first == again[0]
        (folder,) = folders()
        seen.append(folder.stat().st_mode & 0o777)
        assert str(first).startswith(str(folder))
    assert seen == [0o700]
    assert not folders()
    async with Recorded().group as group:
        await group.start("worker")
        assert not folders()
