"""Edges to another process: it gets what is sent, and whatever happens to it is noticed and leaves nothing."""

from __future__ import annotations

import signal

import pytest
import torch
from edge_helpers import message, nothing_left, peer, same

from asyncpipe.ops.edges.connect import HOST_TRANSPORTS, Edges

transports = pytest.mark.parametrize("transport", HOST_TRANSPORTS)
LARGE = 1 << 17


def warm_up() -> None:
    """The fork server stays."""
    with peer():
        pass


@transports
def test_everything_comes_back(transport: str) -> None:
    sent = [
        message(task, torch.randn(2, size), None, torch.arange(size) % 2 == 0, meta=b"%d" % (task % 3))
        for task, size in enumerate([1, 0, 1000, LARGE, 17, LARGE + 5, 3] * 3)
    ]
    with peer(transport=transport, window=5) as other:
        for each in sent:
            other.out.send(each)
        received = [other.inbox.take() for _ in sent]
    assert all(map(same, received, sent))


@transports
def test_a_killed_peer(transport: str) -> None:
    warm_up()
    with nothing_left(), peer(transport=transport) as other:
        sent = message(1, torch.randn(LARGE))
        other.out.send(sent)
        received = other.inbox.take()
        other.signal(signal.SIGKILL)
        errors = [other.inbox.error() for _ in range(2)]  # One for each edge.
        assert sorted(str(each).split(" broke: ")[0] for each in errors) == [
            "the edge 0 > 1 to worker 1",
            "the edge 1 > 0 to worker 1",
        ]
        assert {each.peers for each in errors} == {(1,)}
        other.out.send(message(2, torch.zeros(3)))  # Nobody gets it.
        assert other.out.traffic().messages == 2
        assert other.inbox.empty
        assert same(received, sent)  # It is this process's now.
        del received


@transports
def test_a_stopped_peer(transport: str) -> None:
    """Nothing waits for it: neither what is sent to it, nor the end."""
    warm_up()
    with nothing_left(), peer(transport=transport, window=1000) as other:
        other.signal(signal.SIGSTOP)
        for task in range(300):
            other.out.send(message(task, torch.zeros(1000), meta=b"%d" % task))
        other.out.send(message(300, torch.zeros(64 * LARGE)))
        other.edges.close()
        assert other.inbox.empty


def test_the_peer_closes_when_this_one_is_gone() -> None:
    """A closed edge is no broken one, and the peer's process ends by itself when it sees a broken one."""
    with peer() as other:
        close_roughly(other.edges)
        other.process.join(20)
        assert other.process.exitcode == 0


def close_roughly(edges: Edges) -> None:
    """As if this process were killed: no last words."""
    for each in (*edges.out.values(), *edges.into.values()):
        each._channel.close()  # Nothing public does this.
        each._channel._open = False
