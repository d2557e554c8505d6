"""Messages that arrive later than they are there: edges of other hosts, on one machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from heapq import heapify, heappop, heappush

from asyncpipe.core.engine.edge_shape import EdgeShape, EdgeState
from asyncpipe.ops.edges.message import ReceivedMessage

__all__ = ["ShapedArrivals"]

_PLAIN = EdgeShape()


def _order(waiting: tuple[float, int, ReceivedMessage]) -> tuple[float, int]:
    return waiting[:2]


class ShapedArrivals:
    """Stands between a worker's edges and ``on_message``, which is called on a thread of its own.

    The order of an edge's messages stays. A message holds its credit meanwhile. Methods are for any thread.
    """

    def __init__(self, shapes: Mapping[int, EdgeShape], on_message: Callable[[ReceivedMessage], None]) -> None:
        """``shapes`` by the number of the worker that sends; edges without one are as they are."""
        self._on_message = on_message
        self._shapes = dict(shapes)
        self._passed: dict[int, float] = {}
        """By sender: when the bytes of its last message have passed."""
        self._last: dict[int, float] = {}
        """By sender: when its last message is due."""
        self._due: list[tuple[float, int, ReceivedMessage]] = []
        """A heap, in the order of coming where the times are equal."""
        self._held: dict[int, list[ReceivedMessage]] = {}
        """By sender: what fell into a black hole."""
        self._count = 0
        self._epoch = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="asyncpipe shaped edges", daemon=True)
        self._thread.start()

    def arrived(self, message: ReceivedMessage) -> None:
        """A message is here; it is passed on when it is due."""
        with self._changed:
            self._schedule(message, message.at)
            self._changed.notify()

    def _schedule(self, message: ReceivedMessage, at: float) -> None:
        sender = message.sender
        shape = self._shapes.get(sender, _PLAIN)
        if shape.state is not EdgeState.OPEN:
            self._held.setdefault(sender, []).append(message)
            return
        size = sum(tensor.nbytes for tensor in message.tensors if tensor is not None)
        self._passed[sender] = passed = shape.passed(at, size, self._passed.get(sender, 0.0))
        self._last[sender] = due = max(passed + shape.latency, self._last.get(sender, 0.0))
        self._count += 1
        heappush(self._due, (due, self._count, message))

    def reshape(self, sender: int, shape: EdgeShape) -> None:
        """Give the edge from ``sender`` another shape. One that is open again passes on what it held."""
        with self._changed:
            self._shapes[sender] = shape
            if shape.state is EdgeState.OPEN:
                now = time.perf_counter()
                for message in self._held.pop(sender, []):
                    self._schedule(message, now)
            else:
                mine = [each for each in self._due if each[2].sender == sender]
                self._due = [each for each in self._due if each[2].sender != sender]
                heapify(self._due)
                self._held.setdefault(sender, []).extend(message for _, _, message in sorted(mine, key=_order))
            self._changed.notify()

    def under_way(self, sender: int) -> int:
        """How many messages of ``sender`` have come, and count as still on their way. From any thread, at once."""
        due = sum(message.sender == sender for _, _, message in self._due.copy())
        return due + len(self._held.get(sender, ()))

    def advance(self, epoch: int) -> None:
        """Begin ``epoch``: messages of older ones are dropped when they are due."""
        with self._changed:
            self._epoch = max(self._epoch, epoch)

    def close(self) -> None:
        """End the thread. What was not passed on never is."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._due.clear()
        self._held.clear()

    def _run(self) -> None:
        while (message := self._next()) is not None:
            self._on_message(message)
            del message  # It has tensors, and the next one may be long in coming.

    def _next(self) -> ReceivedMessage | None:
        """The next message, when it is due; ``None`` at the end."""
        with self._changed:
            while not self._closed:
                due = self._due[0][0] if self._due else None
                if due is not None and (late := time.perf_counter()) >= due:
                    _, _, message = heappop(self._due)
                    if message.header.epoch >= self._epoch:
                        return replace(message, at=late)
                    message.release()
                    del message
                    continue
                self._changed.wait(None if due is None else due - time.perf_counter())
        return None
