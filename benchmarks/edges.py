"""What a message between two worker processes costs, against a bare ``torch.distributed.send`` and ``recv`` over gloo.

Two processes, this one and one more, send one tensor of each size to and fro, and in one direction. An arm is a way to
send; the arms take turns in each round, and what an edge costs more than a bare message is compared within a round.
Bare messages are sent and received by the thread that wants them. Those of edges pass a queue at the receiver, as in a
worker with several devices; "taken" is what a worker's only device does, which looks for messages itself.
"""

from __future__ import annotations

import select
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor, distributed

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import rounds, table
from asyncpipe.errors import EdgeError
from asyncpipe.ops.edges.connect import HOST_TRANSPORTS, Edges, connect
from asyncpipe.ops.edges.message import EdgeHeader, EdgeMessage, ReceivedMessage
from asyncpipe.runtime.workers.door import Door
from asyncpipe.runtime.workers.meeting import meet
from benchmarks.turns import alternating, interrupts_blocked

__all__ = ["EdgesSize", "run", "show"]

BARE = "bare gloo"
BOTH = [(0, 1), (1, 0)]
TAKEN = ", taken"
_TRANSPORT_OF = {f"shared_memory{TAKEN}": "shared_memory", **{name: name for name in HOST_TRANSPORTS}}
"""By arm."""
PATIENCE = timedelta(seconds=60)
LOOK_AGAIN = 5.0
"""Milliseconds."""
META = b"the structure of the tensors, which an edge sends once"


@dataclass(frozen=True, slots=True)
class EdgesSize:
    """What is sent, and how often."""

    bytes: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 8 << 20, 32 << 20)
    rounds: int = 15
    warm_up: int = 2
    bytes_a_round: int = 128 << 20
    messages_at_most: int = 300
    """In a round; fewer, if they are more than ``bytes_a_round``."""

    def messages(self, size: int) -> int:
        return max(1, min(self.messages_at_most, self.bytes_a_round // size))


def run(progress: Progress, *, size: EdgesSize | None = None) -> Figures:
    """Microseconds a message: of half a round trip, and of each message of a stream in one direction.

    Medians over the rounds, as are the differences from bare messages (``us_more``).
    """
    size = size or EdgesSize()
    # Not the prefix of workers' folders: a worker removes those that nobody has locked.
    with TemporaryDirectory(prefix="asyncpipe-bench-") as folder:
        process = get_context("spawn").Process(target=_other_process, args=(folder, size), daemon=True)
        with interrupts_blocked():
            process.start()
        try:
            found = _measure(0, folder, size, progress)
        finally:
            process.kill()
            process.join()
    arms = [BARE, *_TRANSPORT_OF]
    return {
        "rounds": size.rounds,
        "arms": arms,
        "us_a_message": {
            name: {way: {arm: median(times[arm]) for arm in arms} for way, times in ways.items()}
            for name, ways in found.items()
        },
        "us_more": {
            name: {
                way: {arm: median(map(float.__sub__, times[arm], times[BARE])) for arm in _TRANSPORT_OF}
                for way, times in ways.items()
            }
            for name, ways in found.items()
        },
    }


def show(figures: Figures) -> str:
    """A table for each way; in brackets, how much more than bare."""
    lines = []
    for way in _WAYS:
        rows = [[f"{way}, µs a message", *figures["arms"]]]
        for name, ways in figures["us_a_message"].items():
            more = figures["us_more"][name][way]
            cells = [f"{us:.0f}" + (f" ({more[arm]:+.0f})" if arm in more else "") for arm, us in ways[way].items()]
            rows.append([name, *cells])
        lines += [*table(rows), ""]
    return "\n".join(lines[:-1])


class Messenger(Protocol):
    """A way to send a tensor to the other process, and to get the next one from it."""

    def send(self, tensor: Tensor) -> None: ...

    def receive(self, like: Tensor) -> Tensor: ...


class _Bare:
    """``torch.distributed`` alone."""

    def __init__(self, rank: int) -> None:
        self._peer = 1 - rank

    def send(self, tensor: Tensor) -> None:
        distributed.send(tensor, self._peer)

    def receive(self, like: Tensor) -> Tensor:
        received = torch.empty_like(like)
        distributed.recv(received, self._peer)
        return received


class _ByEdges:
    """An edge in each direction."""

    def __init__(self, rank: int, edges: Edges, arrived: SimpleQueue[ReceivedMessage | EdgeError]) -> None:
        self._out = edges.out[1 - rank]
        self._into = edges.into[1 - rank]
        self._poll = select.poll()
        self._poll.register(self._into.descriptor, select.POLLIN)
        self._arrived = arrived
        self._step = 0

    def send(self, tensor: Tensor) -> None:
        self._step += 1
        self._out.send(EdgeMessage(EdgeHeader(0, self._step, 1, 2), [tensor], META))

    def receive(self, like: Tensor) -> Tensor:
        while self._into.is_shared and self._arrived.empty():
            self._poll.poll(LOOK_AGAIN)  # The edge's thread may have been quicker.
            self._into.take()
        message = self._arrived.get(timeout=PATIENCE.total_seconds())
        if isinstance(message, EdgeError):
            raise message
        message.release()
        (tensor,) = message.tensors
        assert tensor is not None
        return tensor


def _other_process(folder: str, size: EdgesSize) -> None:
    _measure(1, folder, size, lambda _: None)


def _measure(
    rank: int, folder: str, size: EdgesSize, progress: Progress
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Both processes do the same: microseconds a message of each round, by size, way and arm."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    with ExitStack() as stack:
        arms = _arms(rank, folder, stack)
        for each in size.bytes:
            tensor = torch.zeros(each, dtype=torch.uint8)
            times: dict[str, dict[str, list[float]]] = {way: {name: [] for name in arms} for way in _WAYS}
            for number in rounds(size.warm_up + size.rounds, progress, f"{_named(each)}: round"):
                for name in alternating(list(arms), number):
                    for way, measured in _WAYS.items():
                        seconds = measured(arms[name], rank, tensor, size.messages(each))
                        if number >= size.warm_up:
                            times[way][name].append(1e6 * seconds)
            found[_named(each)] = times
        # Neither end closes while the other one still waits for what it has sent last.
        said = torch.zeros(1, dtype=torch.uint8)
        if rank == 0:
            arms[BARE].send(said)
        else:
            arms[BARE].receive(said)
    return found


def _arms(rank: int, folder: str, stack: ExitStack) -> dict[str, Messenger]:
    store = (Path(folder) / "store").as_uri()
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=PATIENCE)
    stack.callback(distributed.destroy_process_group)
    arms: dict[str, Messenger] = {BARE: _Bare(rank)}
    for name, transport in _TRANSPORT_OF.items():
        arrived: SimpleQueue[ReceivedMessage | EdgeError] = SimpleQueue()
        door = Door(rank, folder=folder)
        sockets = meet(rank, BOTH, door, {1 - rank: f"{folder}/{1 - rank}"}, job=name, secret=b"")
        edges = connect(
            rank,
            sockets,
            on_message=arrived.put,
            on_broken=arrived.put,
            transport=transport,
            shared=name.endswith(TAKEN),
        )
        stack.callback(edges.close)
        arms[name] = _ByEdges(rank, edges, arrived)
    return arms


def _named(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _to_and_fro(arm: Messenger, rank: int, tensor: Tensor, messages: int) -> float:
    """Seconds of half a round trip."""
    begun = perf_counter()
    for _ in range(messages):
        if rank == 0:
            arm.send(tensor)
            arm.receive(tensor)
        else:
            arm.receive(tensor)
            arm.send(tensor)
    return (perf_counter() - begun) / messages / 2


def _one_way(arm: Messenger, rank: int, tensor: Tensor, messages: int) -> float:
    """Seconds of each message of a stream, until the other end has the last one and says so."""
    said = torch.zeros(1, dtype=torch.uint8)
    begun = perf_counter()
    if rank == 0:
        for _ in range(messages):
            arm.send(tensor)
        arm.receive(said)
    else:
        for _ in range(messages):
            arm.receive(tensor)
        arm.send(said)
    return (perf_counter() - begun) / messages


_WAYS = {"to and fro": _to_and_fro, "one way": _one_way}
