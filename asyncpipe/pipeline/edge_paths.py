"""Which way the edges of a pipeline take: inside a machine, or between two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncpipe.errors import OptionError
from asyncpipe.pipeline.wire_messages import OpenedDoor
from asyncpipe.runtime.part_messages import Call
from asyncpipe.runtime.workers.connection import WorkerConnection
from asyncpipe.runtime.workers.launcher import Address
from asyncpipe.runtime.workers.place import is_loopback

__all__ = ["EdgePaths"]


class EdgePaths:
    """What workers are told to find each other; by where they are."""

    def __init__(
        self,
        connections: Mapping[str, WorkerConnection],
        numbers: Mapping[str, int],
        pairs: Sequence[tuple[int, int]],
        transport: str,
    ) -> None:
        """``connections`` by the workers' names; ``transport`` is what the pool was given."""
        self._of: dict[int, list[tuple[int, int]]] = {number: [] for number in numbers.values()}
        """The edges of each worker, in an order that is one for all."""
        for pair in sorted(pairs):
            for each in pair:
                self._of[each].append(pair)
        self._names = {numbers[name]: name for name in connections}
        self._numbers = numbers
        self._places = {numbers[name]: each.place for name, each in connections.items()}
        between = "connection" if transport in ("shared_memory", "host_memory") else transport
        self._transports = transport, between
        """Inside a machine, and between two. These share no memory, so there the edge's connection replaces it."""
        self.is_far = not all(map(self._is_local, pairs))
        """Whether some are between machines."""

    def of(self, worker: str) -> Sequence[tuple[int, int]]:
        """The edges of ``worker``."""
        return self._of[self._numbers[worker]]

    def peers(self, worker: str) -> list[str]:
        """The workers that it has edges with, and itself."""
        numbers = {self._numbers[worker], *(each for pair in self.of(worker) for each in pair)}
        return [self._names[number] for number in sorted(numbers)]

    def transports(self, worker: str) -> dict[tuple[int, int], str]:
        """How tensors travel on the edges of ``worker``."""
        local, between = self._transports
        return {pair: local if self._is_local(pair) else between for pair in self.of(worker)}

    def open_door(self, pipeline: int, worker: str, interface: str | None) -> Call:
        """For whom ``worker`` must open its door. The answer is an ``OpenedDoor``."""
        me = self._numbers[worker]
        coming = {self._is_local(pair) for pair in self.of(worker) if pair[1] == me}
        return Call(pipeline, "open_door", (me, True in coming, False in coming, interface))

    def addresses(self, worker: str, doors: Mapping[str, OpenedDoor]) -> dict[int, Address]:
        """Where ``worker`` reaches those that it sends to, whose doors are open.

        Raises ``OptionError`` if another machine would have to reach one by loopback.
        """
        me = self._numbers[worker]
        found: dict[int, Address] = {}
        for pair in self.of(worker):
            if pair[0] == me:
                door = doors[self._names[pair[1]]]
                address = door.local if self._is_local(pair) else door.remote
                assert address is not None
                if not isinstance(address, str):
                    self._check(pair, address[0])
                found[pair[1]] = address
        return found

    def _check(self, pair: tuple[int, int], address: str) -> None:
        sender, receiver = (self._places[each] for each in pair)
        if is_loopback(address) and not (is_loopback(sender.address) and sender.host == receiver.host):
            names = [self._names[each] for each in pair]
            raise OptionError(
                f"worker {names[0]!r} on {sender.host} cannot reach worker {names[1]!r} on {receiver.host} at "
                f"{address}, which is for processes of one machine; say where with interface=, as 'eth0' or "
                "'10.1.0.0/16'"
            )

    def _is_local(self, pair: tuple[int, int]) -> bool:
        sender, receiver = pair
        return self._places[sender].machine == self._places[receiver].machine
