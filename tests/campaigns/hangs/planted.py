"""The entry of the campaign's workers: those of the package, in which one thing hangs when they are told so.

``sleep``   a task of a device goes on for ever
``stop``    the process is stopped inside a task, or when a message comes; or a task holds the interpreter for ever
``credit``  what comes on an edge is taken, and its credits are never given back
``take``    who takes messages of an edge never returns
``link``    what is sent on an edge does not arrive
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncpipe.core.graph.task import Task
from asyncpipe.ops.edges.channel import EdgeChannel
from asyncpipe.ops.edges.connect import Edges, connect
from asyncpipe.ops.edges.edge_out import EdgeOut
from asyncpipe.ops.edges.message import EdgeMessage, ReceivedMessage
from asyncpipe.ops.execute.binder import Binder
from asyncpipe.pipeline.resident import links
from asyncpipe.runtime.workers.control_client import ControlClient
from tests.campaigns.serving import serve_campaign
from tests.support import shaped_edges

__all__ = ["ENTRY", "HELD", "SHAPED_ENTRY", "Plant", "planted", "planted_and_shaped"]

ENTRY = "tests.campaigns.hangs.planted:planted"
SHAPED_ENTRY = "tests.campaigns.hangs.planted:planted_and_shaped"
"""With edges that can be shaped: devices take no messages themselves."""
HELD = "gil"
"""The way of a task to go on for ever in which nothing else in its process can run."""

WAYS: dict[str, Callable[[], object]] = {
    "wait": lambda: threading.Event().wait(),
    "sleep": lambda: time.sleep(1e6),
    "below Python": lambda: ctypes.CDLL(None).sleep(1_000_000),
    HELD: lambda: ctypes.PyDLL(None).sleep(1_000_000),
    "stop": lambda: _stop(),
}


@dataclass(frozen=True)
class Plant:
    """What is to hang, and where. Nothing, if there is no kind."""

    kind: str = ""
    note: Path = Path()
    """Where to write when it does."""
    task: str = ""
    device: str = ""
    way: str = ""
    edge: tuple[int, int] = (-1, -1)
    """The numbers of the workers that it leads from and to."""
    after: int = 0
    """So many messages of the edge are good."""
    window: int = 0
    """The most messages that the edge's receiver may hold; 0 for as many as it wants."""


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()  # Another thread may be the one that takes it, and this one must not go on meanwhile.


class _Planted:
    """What hangs in this worker."""

    def __init__(self) -> None:
        self.now = Plant()
        self._count = 0
        self._lock = threading.Lock()
        self.edges: list[Edges] = []
        self.ends: dict[EdgeChannel, tuple[int, int]] = {}
        self.holes: set[tuple[int, int]] = set()
        """Edges on which nothing gets through."""

    def arm(self, plant: Plant) -> None:
        self.now, self._count = plant, 0
        self.holes.clear()
        if plant.window:
            sender, _ = plant.edge
            for edges in self.edges[-1:]:
                edges.into[sender].set_window(plant.window)

    def is_due(self, kinds: Sequence[str], edge: tuple[int, int]) -> bool:
        """Whether one more message of ``edge`` is to hang by one of these kinds."""
        with self._lock:
            plant = self.now
            if plant.kind not in kinds or edge != plant.edge:
                return False
            self._count += 1
            if self._count == plant.after + 1:
                self.tell()
            return self._count > plant.after

    def tell(self) -> None:
        self.now.note.write_text(str(time.perf_counter()))


_planted = _Planted()


def _bind(bind: Callable[[Binder, Task], Callable[[], Any]]) -> Callable[[Binder, Task], Callable[[], Any]]:
    def watched(binder: Binder, task: Task) -> Callable[[], Any]:
        plant, work = _planted.now, bind(binder, task)
        if (task.id, task.lane.device) != (plant.task, plant.device):
            return work

        def hung() -> Any:
            _planted.tell()
            WAYS[plant.way]()

        return hung

    return watched


class _Incoming:
    """What edges call in the place of the package's own."""

    def __init__(self, me: int, on_message: Callable[[ReceivedMessage], None]) -> None:
        self._me = me
        self._on_message = on_message

    def __call__(self, message: ReceivedMessage) -> None:
        edge = message.sender, self._me
        if _planted.is_due(("take",), edge):
            threading.Event().wait()
        if _planted.is_due(("stop",), edge):
            _stop()
        if _planted.is_due(("credit",), edge):
            message = replace(message, release=lambda: None)
        self._on_message(message)


def _connect(me: int, *args: Any, on_message: Callable[[ReceivedMessage], None], **options: Any) -> Edges:
    edges = connect(me, *args, on_message=_Incoming(me, on_message), **options)
    _planted.edges.append(edges)
    return edges


def _install() -> None:
    """Put what hangs between the package's parts, in this worker alone."""
    make, send, write = EdgeOut.__init__, EdgeOut.send, EdgeChannel.write

    def noted(self: EdgeOut, me: int, peer: int, channel: EdgeChannel, *args: Any) -> None:
        _planted.ends[channel] = me, peer
        make(self, me, peer, channel, *args)

    def watched(self: EdgeOut, message: EdgeMessage) -> None:
        if _planted.is_due(("link",), (self.me, self.peer)):
            _planted.holes.add((self.me, self.peer))
        send(self, message)

    def lost(self: EdgeChannel, buffers: Sequence[Any], owners: Sequence[object] = ()) -> bool:
        return _planted.ends.get(self) in _planted.holes or write(self, buffers, owners)

    Binder.bind = _bind(Binder.bind)  # type: ignore[method-assign]
    EdgeOut.__init__ = noted  # type: ignore[method-assign, assignment]
    EdgeOut.send = watched  # type: ignore[method-assign]
    EdgeChannel.write = lost  # type: ignore[method-assign]
    links.connect = _connect  # type: ignore[attr-defined]


async def planted(control: ControlClient) -> None:
    """Serve the controller, and hang as the campaign says."""
    _install()
    await serve_campaign(control, _take)


async def planted_and_shaped(control: ControlClient) -> None:
    """The same with edges that can be shaped."""
    shaped_edges.install()
    await planted(control)


def _take(message: Any) -> bool:
    if isinstance(message, Plant):
        _planted.arm(message)
        return True
    return False
