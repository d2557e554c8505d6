"""Edges of an open pool that are slower than they are, or do not work, so that workers of one machine stand for hosts.

The package knows nothing of it: a worker's entry (``serve``) replaces its ``Links`` by ``ShapedLinks``. What shape an
edge of a new pipeline has is in a file, which workers find in a folder that the controller has put into their
``sys.path``.
"""

from __future__ import annotations

import math
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, finalize

from asyncpipe import DevicePool
from asyncpipe.errors import OptionError
from asyncpipe.ops.edges.message import ReceivedMessage
from asyncpipe.pipeline import workers as workers_of_pools
from asyncpipe.pipeline.resident import resident
from asyncpipe.pipeline.resident import serve as package
from asyncpipe.pipeline.resident.links import Links
from asyncpipe.pipeline.wire_messages import LoadPipeline
from asyncpipe.runtime.part_messages import Call
from asyncpipe.runtime.workers.control_client import ControlClient
from tests.support.severed import sever

__all__ = ["EdgeShape", "EdgeState", "install", "reshape", "serve", "shape_edges"]

Shapes = dict[tuple[str, str], "EdgeShape"]
"""By the names of the workers that an edge leads from and to."""
PREFIX = "shaped-edges-"
"""Not the package's own, which workers look for, to remove what dead ones have left."""
ENTRY = "tests.support.shaped_edges:serve"
_shapes: WeakKeyDictionary[DevicePool, tuple[Path, Shapes]] = WeakKeyDictionary()


class EdgeState(StrEnum):
    """Whether an edge carries messages."""

    OPEN = "open"
    BLACK_HOLE = "black_hole"
    """What is sent does not arrive, and nobody is told: until it is open again."""
    CUT = "cut"
    """Its connection is closed; both ends are told. It stays so until the pipeline opens anew."""


@dataclass(frozen=True, slots=True)
class EdgeShape:
    """A directed edge that is slower than it is, or does not work, for tests and measurements.

    A message arrives when all its bytes have passed at the ``bandwidth``, behind those before it, and then so many
    seconds of ``latency`` later; but not before it has arrived in fact.
    """

    latency: float = 0.0
    """Seconds, in one direction."""
    bandwidth: float = math.inf
    """Bytes of tensors a second."""
    state: EdgeState = EdgeState.OPEN

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency) and self.latency >= 0 and self.bandwidth > 0):
            raise OptionError(
                f"an edge's latency is a number of seconds, 0 or more, and its bandwidth one of bytes a second, more "
                f"than 0; got {self.latency} and {self.bandwidth}"
            )

    def passed(self, at: float, size: int, free: float) -> float:
        """When ``size`` bytes that are there ``at`` have passed, on an edge that is ``free`` then; latency follows."""
        return max(at, free) + size / self.bandwidth


_PLAIN = EdgeShape()


def _order(waiting: tuple[float, int, ReceivedMessage]) -> tuple[float, int]:
    return waiting[:2]


class ShapedArrivals:
    """Stands between a worker's edges and ``on_message``, which is called on a thread of its own.

    The order of an edge's messages stays. A message holds its credit meanwhile. Methods are for any thread.
    """

    def __init__(self, on_message: Callable[[ReceivedMessage], None]) -> None:
        """Edges that ``reshape`` has given no shape are as they are."""
        self._on_message = on_message
        self._shapes: dict[int, EdgeShape] = {}
        """By the number of the worker that sends."""
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


class ShapedLinks(Links):
    """The links of a pipeline in a worker, with shapes. The devices take no messages themselves."""

    def __init__(self, load: LoadPipeline, control: ControlClient) -> None:
        super().__init__(load, control)
        self._shaped = ShapedArrivals(super()._arrived)

    def open(self, door: Any, own: Any, listener: Any) -> None:
        self.reshape(_written())
        super().open(door, own, None)

    def close(self) -> None:
        super().close()
        self._shaped.close()

    def advance(self, epoch: int) -> None:
        super().advance(epoch)
        self._shaped.advance(epoch)

    def reports(self, number: int, parts: Any) -> Any:
        sends, takes = super().reports(number, parts)
        numbers = {name: peer for peer, name in self._load.names.items()}
        return sends, {
            name: each._replace(came=each.came - self._shaped.under_way(numbers[name])) for name, each in takes.items()
        }

    def _arrived(self, message: ReceivedMessage) -> None:
        self._shaped.arrived(message)

    def reshape(self, shapes: Shapes) -> None:
        """Give edges other shapes."""
        numbers = {name: number for number, name in self._load.names.items()}
        for (sender, receiver), shape in shapes.items():
            if receiver == self._control.name and sender in numbers:
                self._shaped.reshape(numbers[sender], shape)
                if shape.state is EdgeState.CUT and numbers[sender] in self._edges.into:
                    sever(self._edges.into[numbers[sender]])


def _written() -> Shapes:
    folder = next(each for each in reversed(sys.path) if Path(each).name.startswith(PREFIX))
    shapes: Shapes = pickle.loads((Path(folder) / "shapes").read_bytes())
    return shapes


def install() -> None:
    """Have the pipelines of this worker use ``ShapedLinks``, for entries that do more."""
    resident.Links = ShapedLinks  # type: ignore[attr-defined]


async def serve(control: ControlClient) -> None:
    """A worker's entry."""
    install()
    await package.serve(control)


def shape_edges(pool: DevicePool) -> DevicePool:
    """``pool``, which is not open yet, with edges that ``reshape`` can make slow or cut.

    An entry that is not the package's own has to ``install``.
    """
    assert pool.workers is not None
    assert not pool.is_open
    group = pool.workers._group
    if group._entry == workers_of_pools.ENTRY == "asyncpipe.pipeline.resident.serve:serve":
        group._entry = ENTRY
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    finalize(pool, _remove, folder, os.getpid())
    _shapes[pool] = folder, {}
    _write(pool, {})
    sys.path.append(str(folder))
    return pool


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # And not a process that was forked from it.
        shutil.rmtree(folder, ignore_errors=True)


async def reshape(pool: DevicePool, shapes: Mapping[tuple[str, str], EdgeShape]) -> None:
    """Give edges of an open pool other shapes, also those of later pipelines."""
    _write(pool, shapes)
    workers = pool.workers
    assert workers is not None
    tell = Call(None, "links.reshape", (dict(shapes),))
    for receiver in {receiver for _, receiver in shapes} & workers.up.keys():
        await pool.run(workers.up[receiver].ask(tell, urgent=True))


def _write(pool: DevicePool, shapes: Mapping[tuple[str, str], EdgeShape]) -> None:
    folder, every = _shapes[pool]
    every.update(shapes)
    written = folder / "next"
    written.write_bytes(pickle.dumps(every))
    written.replace(folder / "shapes")
