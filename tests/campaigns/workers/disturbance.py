"""The entry of the campaign's workers: those of the package, whose messages are late, or break a rule of edges.

What is late: messages on their way into and out of an edge, each by a random time, so that those of several edges come
in any order; and the begin of a step in a worker, so that others are ahead of it. Small messages may go the way of
large ones. Broken on purpose, to see that the campaign sees it:

- ``swap``, rule (1): of two messages of equal shape on one edge, each brings the other one's tensors;
- ``wait``, rule (3): an edge waits with the next message until a task has taken this one;
- ``stale``, rule (6): there are no epochs, and what comes late for a step that is over counts for the one that runs.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from asyncpipe.ops.edges.connect import Edges, connect
from asyncpipe.ops.edges.edge_in import EdgeIn
from asyncpipe.ops.edges.edge_out import EdgeOut
from asyncpipe.ops.edges.message import EdgeMessage, ReceivedMessage
from asyncpipe.ops.edges.shared_memory import SharedMemoryOut
from asyncpipe.pipeline.resident import links, resident
from asyncpipe.runtime.workers.control_client import ControlClient
from tests.campaigns.serving import serve_campaign

__all__ = ["ENTRY", "Disturb", "disturbed"]

ENTRY = "tests.campaigns.workers.disturbance:disturbed"
HELD_SECONDS = 0.005
"""How long the first of two messages waits for the second, to be swapped."""
TAKEN_SECONDS = 2.0
"""For a task to take a message. More than a case needs, and little enough to end behind a deadlock."""


@dataclass(frozen=True)
class Disturb:
    """Controller: how the messages of pipelines from now on are disturbed."""

    microseconds: int = 0
    breaks: str = ""
    inline_bytes: int = 1 << 12
    direct_bytes: int = 1 << 18


class _Disturbance:
    """What this worker does to messages now."""

    def __init__(self) -> None:
        self.now = Disturb()
        self.step = -1
        """The last one that has begun."""
        self._chance = random.Random()

    def wait(self) -> None:
        """On any thread."""
        if self.now.microseconds and self._chance.random() < 0.5:
            time.sleep(self._chance.random() * self.now.microseconds * 1e-6)


_disturbance = _Disturbance()


class _Incoming:
    """What edges call in the place of the package's own: passes messages on, late or broken."""

    def __init__(self, on_message: Callable[[ReceivedMessage], None]) -> None:
        self._on_message = on_message
        self._held: dict[int, ReceivedMessage] = {}
        self._lock = threading.Lock()

    def __call__(self, message: ReceivedMessage) -> None:
        _disturbance.wait()
        breaks = _disturbance.now.breaks
        if breaks == "swap" and message.tensors:
            self._swap(message)
        elif breaks == "wait" and message.tensors:
            self._pass_on_and_wait(message)
        elif breaks == "stale" and message.header.step < _disturbance.step:
            self._on_message(replace(message, header=message.header._replace(step=_disturbance.step)))
        else:
            self._on_message(message)

    def _swap(self, message: ReceivedMessage) -> None:
        with self._lock:
            first = self._held.pop(message.sender, None)
            if first is None:
                self._held[message.sender] = message
                threading.Timer(HELD_SECONDS, self._let_go, (message,)).start()
                return
        if first.meta == message.meta and _shapes(first) == _shapes(message):
            first, message = replace(first, tensors=message.tensors), replace(message, tensors=first.tensors)
        self._on_message(first)
        self._on_message(message)

    def _let_go(self, message: ReceivedMessage) -> None:
        with self._lock:
            if self._held.get(message.sender) is not message:
                return
            del self._held[message.sender]
        self._on_message(message)

    def _pass_on_and_wait(self, message: ReceivedMessage) -> None:
        taken = threading.Event()

        def release() -> None:
            message.release()
            taken.set()

        self._on_message(replace(message, release=release))
        taken.wait(TAKEN_SECONDS)


def _shapes(message: ReceivedMessage) -> list[Any]:
    return [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in message.tensors]


def _connect(*args: Any, on_message: Callable[[ReceivedMessage], None], **options: Any) -> Edges:
    return connect(*args, on_message=_Incoming(on_message), **options)


def _install() -> None:
    """Put the disturbance between the package's parts, in this worker alone."""
    send, start = EdgeOut.send, resident.Resident.start

    def send_late(self: EdgeOut, message: EdgeMessage) -> None:
        _disturbance.wait()
        if _disturbance.now.breaks == "stale":
            message = replace(message, header=message.header._replace(epoch=0))
        send(self, message)

    def start_late(self: resident.Resident, message: Any) -> Any:
        _disturbance.wait()
        _disturbance.step = message.step
        return start(self, message)

    for edge in (EdgeIn, EdgeOut):
        edge.advance = _unless_stale(edge.advance)  # type: ignore[method-assign, assignment]
    EdgeOut.send = send_late  # type: ignore[method-assign]
    resident.Resident.start = start_late  # type: ignore[method-assign]
    links.connect = _connect  # type: ignore[attr-defined]


def _unless_stale(advance: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    def advance_or_not(self: Any, epoch: int) -> None:
        if _disturbance.now.breaks != "stale":
            advance(self, epoch)

    return advance_or_not


async def disturbed(control: ControlClient) -> None:
    """Serve the controller, and be disturbed."""
    _install()
    await serve_campaign(control, _take)


def _take(message: Any) -> bool:
    if not isinstance(message, Disturb):
        return False
    _disturbance.now = message
    SharedMemoryOut.inline_bytes, SharedMemoryOut.direct_bytes = message.inline_bytes, message.direct_bytes
    return True
