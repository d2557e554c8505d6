"""Edges between workers: both ends in one process, or the other end in a process that sends everything back."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import torch
from preloaded import preloaded_context
from thread_helpers import run_all, threads_of_asyncpipe
from torch import Tensor

from asyncpipe.errors import EdgeError
from asyncpipe.ops.edges.connect import Edges, connect
from asyncpipe.ops.edges.message import EdgeHeader, EdgeMessage, ReceivedMessage
from asyncpipe.runtime.workers.door import Door
from asyncpipe.runtime.workers.meeting import Pair, meet

__all__ = [
    "BOTH",
    "SECONDS",
    "SECRET",
    "Inbox",
    "Joined",
    "connect_in",
    "joined",
    "message",
    "nothing_left",
    "peer",
    "same",
]

BOTH = [(0, 1), (1, 0)]
SECONDS = 20.0


class Inbox:
    """What has arrived at a worker, in order, and what broke."""

    def __init__(self) -> None:
        self._arrived: SimpleQueue[ReceivedMessage] = SimpleQueue()
        self._broken: SimpleQueue[EdgeError] = SimpleQueue()
        self.on_message = self._arrived.put
        self.on_broken = self._broken.put

    def take(self, *, release: bool = True, wait: bool = True) -> ReceivedMessage:
        found = self._arrived.get(timeout=SECONDS)
        if wait and found.ready is not None:
            found.ready.synchronize()
        if release:
            found.release()
        return found

    def tasks(self, count: int) -> list[int]:
        """The tasks of the next messages."""
        return [self.take().header.task for _ in range(count)]

    def error(self) -> EdgeError:
        return self._broken.get(timeout=SECONDS)

    @property
    def empty(self) -> bool:
        return self._arrived.empty() and self._broken.empty()

    def drop(self) -> None:
        """Let go of what nobody has taken."""
        while not self._arrived.empty():
            self._arrived.get()


class Joined:
    """Two workers of this process, with an edge in each direction."""

    def __init__(self, edges: Sequence[Edges], inboxes: Sequence[Inbox]) -> None:
        self.edges = edges
        self.inboxes = inboxes
        self.out = edges[0].out[1]
        self.into = edges[1].into[0]
        self.inbox = inboxes[1]


@contextmanager
def folder() -> Iterator[str]:
    """With a short name, for sockets. It must be empty in the end."""
    with TemporaryDirectory(prefix="edges") as name:
        yield name
        assert os.listdir(name) == []


SECRET = b"what workers know"


def connect_in(
    folder: str,
    me: int,
    pairs: Sequence[Pair],
    *,
    job: str = "job",
    secret: bytes = SECRET,
    timeout: float = SECONDS,
    **options: Any,
) -> Edges:
    """The edges of a worker that meets the others in ``folder``."""
    door = Door(me, folder=folder)
    addresses = {receiver: f"{folder}/{receiver}" for _, receiver in pairs}
    sockets = meet(me, pairs, door, addresses, job=job, secret=secret, timeout=timeout)
    return connect(me, sockets, timeout=timeout, **options)


@contextmanager
def joined(*, inboxes: Sequence[Inbox] | None = None, **options: Any) -> Iterator[Joined]:
    inboxes = inboxes or [Inbox(), Inbox()]
    with folder() as name:
        connects = [
            partial(
                connect_in,
                name,
                me,
                BOTH,
                on_message=inboxes[me].on_message,
                on_broken=inboxes[me].on_broken,
                **options,
            )
            for me in (0, 1)
        ]
        edges = run_all(*connects)
    for each in edges:
        if isinstance(each, Exception):
            raise each
    try:
        yield Joined(edges, inboxes)
    finally:
        for each in edges:
            each.close()


class PeerProcess:
    """Worker 1, in a process of its own, which sends everything back."""

    def __init__(self, process: Any, edges: Edges, inbox: Inbox) -> None:
        self.process = process
        self.edges = edges
        self.out = edges.out[1]
        self.inbox = inbox

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


@contextmanager
def peer(**options: Any) -> Iterator[PeerProcess]:
    """Worker 0 is here."""
    inbox = Inbox()
    with folder() as name:
        process = preloaded_context().Process(target=_send_back, args=(name, options), daemon=True)
        process.start()
        try:
            callbacks = {"on_message": inbox.on_message, "on_broken": inbox.on_broken}
            edges = connect_in(name, 0, BOTH, **callbacks, **options)
            try:
                edges.out[1].send(message())
                inbox.take()  # The peer has connected, too.
                yield PeerProcess(process, edges, inbox)
            finally:
                edges.close()
                inbox.drop()
        finally:
            process.kill()
            process.join()
            process.close()


def _send_back(name: str, options: Mapping[str, Any]) -> None:
    arrived: SimpleQueue[ReceivedMessage | EdgeError] = SimpleQueue()
    edges = connect_in(name, 1, BOTH, on_message=arrived.put, on_broken=arrived.put, **options)
    while not isinstance(received := arrived.get(), EdgeError):
        received.release()
        edges.out[0].send(EdgeMessage(received.header, received.tensors, received.meta))
        del received
    edges.close()


def message(task: int = 0, *tensors: Tensor | None, epoch: int = 0, meta: bytes = b"", **more: Any) -> EdgeMessage:
    return EdgeMessage(EdgeHeader(epoch, 7, task, task + 1), tensors, meta, **more)


def same(received: ReceivedMessage, sent: EdgeMessage) -> bool:
    """Whether header, meta and tensors are equal bit by bit."""
    return (
        received.header == sent.header
        and received.meta == sent.meta
        and len(received.tensors) == len(sent.tensors)
        and all(map(_same_tensor, received.tensors, sent.tensors))
    )


def _same_tensor(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return (a.dtype, a.shape) == (b.dtype, b.shape) and _bytes(a) == _bytes(b)


def _bytes(tensor: Tensor) -> bytes:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return bytes(plain.view(-1).view(torch.uint8).numpy()) if plain.numel() else b""


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails if the block leaves a thread, a file descriptor or shared memory."""
    before = _resources()
    yield
    after = _resources()
    assert after == before, (after, before)


def _resources() -> tuple[set[threading.Thread], list[str], list[str]]:
    shared = Path("/dev/shm")
    open_files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if os.path.lexists(path)]
    kinds = sorted(name.split(":")[0] for name in open_files if not name.startswith("/proc"))
    return threads_of_asyncpipe(), kinds, sorted(path.name for path in shared.iterdir()) if shared.exists() else []
