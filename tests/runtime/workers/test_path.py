"""What somebody on the path between two hosts changes, repeats, swaps or puts in is not taken for the other end's."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from edge_helpers import SECONDS, SECRET, Inbox, message, nothing_left, same
from path_helpers import OnThePath
from thread_helpers import Threads
from worker_helpers import Recorded

from asyncpipe.ops.edges.connect import Edges, connect
from asyncpipe.ops.edges.message import MessageLayout
from asyncpipe.ops.edges.wire import HEADER_SIZE, EdgeFrameKind, Frame
from asyncpipe.runtime.workers.channel import Role, _frames
from asyncpipe.runtime.workers.door import Door
from asyncpipe.runtime.workers.launcher import Invitation
from asyncpipe.runtime.workers.meeting import meet
from asyncpipe.runtime.workers.packed import pack
from asyncpipe.runtime.workers.process_launcher import ProcessLauncher
from asyncpipe.secured import MAC_BYTES, MacError

NO_MAC = bytes(MAC_BYTES)
VALUES = torch.arange(16.0)
SIZE = HEADER_SIZE + MAC_BYTES + VALUES.nbytes + MAC_BYTES
"""Bytes of a frame with these values."""


class Canary:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Canary]:
    yield Canary(tmp_path / "canary")
    assert not (tmp_path / "canary").exists()


def changed_value(frames: bytes, _: Canary) -> bytes:
    place = SIZE - MAC_BYTES - 1
    return frames[:place] + bytes([frames[place] ^ 1]) + frames[place + 1 :]


def injected_pickle(frames: bytes, canary: Canary) -> bytes:
    layout = MessageLayout(b"more" + pickle.dumps(canary), ()).encode()
    forged = [Frame(EdgeFrameKind.LAYOUT, 9, size=len(layout)).encode(), layout]
    forged += [Frame(EdgeFrameKind.MESSAGE, 9, 0, 0, 7, 2, 3).encode()]
    return b"".join(piece + NO_MAC for piece in forged) + frames


@pytest.mark.promise(
    "Security", "Over TCP, nothing of a message that was changed, inserted, repeated or swapped on the path is used."
)
@pytest.mark.parametrize(
    ("change", "arrive"),
    [
        (changed_value, []),
        (injected_pickle, []),
        (lambda frames, _: frames[:SIZE] + frames, [2]),
        (lambda frames, _: frames[SIZE:] + frames[:SIZE], []),
        (lambda frames, _: frames[SIZE:], []),
    ],
    ids=["changed value", "injected pickle", "replayed", "swapped", "left out"],
)
def test_nothing_of_a_changed_frame_of_an_edge_is_used(
    change: Callable[[bytes, Canary], bytes], arrive: list[int], canary: Canary
) -> None:
    with nothing_left():
        door, inboxes = Door(1, host="127.0.0.1"), (Inbox(), Inbox())
        assert door.remote is not None
        path = OnThePath(door.remote)

        def begin(me: int, door: Door) -> Edges:
            sockets = meet(me, [(0, 1)], door, {1: path.address}, job="job", secret=SECRET, timeout=SECONDS)
            callbacks: Any = {"on_message": inboxes[me].on_message, "on_broken": inboxes[me].on_broken}
            return connect(me, sockets, transport="connection", **callbacks)

        receiver = Threads(lambda: begin(1, door))
        sender = begin(0, Door(0))
        (edges,) = receiver.join()
        assert isinstance(edges, Edges)
        first = message(1, VALUES)
        sender.out[1].send(first)
        assert same(inboxes[1].take(), first)  # From now on, a frame is a message.
        held = b""

        def change_both(data: bytes) -> bytes:
            nonlocal held
            held += data
            return change(held, canary) if len(held) == 2 * SIZE else b""

        path.change = change_both
        for task in (2, 3):
            sender.out[1].send(message(task, VALUES))
        error = inboxes[1].error()
        assert isinstance(error.__cause__, MacError)
        assert str(error) == (
            "the edge 0 > 1 to worker 0 broke: MacError: what came is not what the other end has sent: its MAC is wrong"
        )
        assert inboxes[1].tasks(len(arrive)) == arrive
        assert inboxes[1].empty
        for each in (sender, edges):
            each.close()
        path.close()


@pytest.mark.promise("Security", "An invitation that passes through torchrun or an agent hides the pool's secret.")
def test_an_invitation_hides_its_secret() -> None:
    first = Invitation("a", "b:c", "d", b"s" * 32, b"t" * 16)
    hidden = first.hidden(b"key")
    assert hidden.hidden(b"key") == first
    others = [replace(first, token=b"u" * 16).hidden(b"key"), first.hidden(b"other")]
    assert len({each.secret for each in (first, hidden, *others)}) == 4


class Through(ProcessLauncher):
    """Its worker connects to the controller by way of somebody else."""

    path: OnThePath

    async def start(self, invitation: Any, own: Any = None) -> Any:
        self.path = OnThePath(invitation.address)
        return await super().start(replace(invitation, address=self.path.address), own)


@pytest.mark.promise(
    "Security", "Over TCP, nothing of a message that was changed, inserted, repeated or swapped on the path is used."
)
@pytest.mark.parametrize("what", ["a pickle for the controller", "a pickle for the worker", "an answer again"])
async def test_a_frame_that_the_other_end_has_not_sent_ends_a_control_connection(what: str, canary: Canary) -> None:
    launcher = Through()
    recorded = Recorded(launcher=launcher, address=("127.0.0.1", 0))
    async with recorded.group as group:
        (worker,) = await group.start("worker")
        assert await worker.ask(("echo", 5)) == 5
        pieces = [piece for each in _frames(1, Role.MESSAGE, 0, pack(("echo", canary)).parts) for piece in each]
        forged = b"".join(bytes(piece) + NO_MAC for piece in pieces)
        to_worker = what != "a pickle for the controller"
        launcher.path.inject(launcher.path.last_answer if what == "an answer again" else forged, back=to_worker)
        loss = await recorded.loss()
        assert "has lost its connection to the controller" in str(loss)
        assert ("its MAC is wrong" in str(loss)) == (not to_worker)
        assert recorded.heard == [("worker", loss)]
    launcher.path.close()
