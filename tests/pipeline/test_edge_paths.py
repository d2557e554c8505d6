"""Which transport an edge has, by where its two workers are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest

from asyncpipe.ops.edges.connect import TRANSPORTS
from asyncpipe.pipeline.edge_paths import EdgePaths
from asyncpipe.pipeline.pool_options import TransportName
from asyncpipe.pipeline.wire_messages import OpenedDoor
from asyncpipe.runtime.workers.place import WorkerPlace

NUMBERS = {"a": 0, "b": 1, "far": 2}


@pytest.mark.parametrize(
    ("transport", "between_machines"),
    [
        ("shared_memory", "connection"),
        ("host_memory", "connection"),
        ("connection", "connection"),
        ("nccl", "nccl"),
        ("pigeon", "pigeon"),
    ],
)
def test_only_shared_memory_is_replaced_between_machines(transport: str, between_machines: str) -> None:
    """A name that is not known stays, and is refused by ``connect``."""
    connections: Any = {
        name: SimpleNamespace(place=WorkerPlace("two" if name == "far" else "one", name, "127.0.0.1"))
        for name in NUMBERS
    }
    paths = EdgePaths(connections, NUMBERS, [(1, 2), (0, 1)], transport)
    assert paths.transports("b") == {(0, 1): transport, (1, 2): between_machines}


def test_a_worker_is_told_of_its_own_edges_and_peers_alone() -> None:
    connections: Any = {name: SimpleNamespace(place=WorkerPlace("one", name, "127.0.0.1")) for name in NUMBERS}
    paths = EdgePaths(connections, NUMBERS, [(2, 1), (1, 2), (0, 1), (1, 0)], "shared_memory")
    doors = {name: OpenedDoor(name, None) for name in NUMBERS}
    assert (paths.of("a"), paths.peers("a")) == ([(0, 1), (1, 0)], ["a", "b"])
    assert (paths.transports("a").keys(), paths.addresses("a", doors)) == ({(0, 1), (1, 0)}, {1: "b"})
    assert paths.of("b") == [(0, 1), (1, 0), (1, 2), (2, 1)], "the order is one for all workers"
    assert (paths.peers("b"), paths.addresses("far", doors)) == (["a", "b", "far"], {1: "b"})


def test_each_name_of_a_transport_is_one_that_edges_know() -> None:
    assert set(get_args(TransportName)) == set(TRANSPORTS)
