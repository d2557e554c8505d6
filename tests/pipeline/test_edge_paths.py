"""Which transport an edge has, by where its two workers are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest

from asyncpipe.ops.edges.connect import TRANSPORTS
from asyncpipe.pipeline.edge_paths import EdgePaths
from asyncpipe.pipeline.pool_options import TransportName
from asyncpipe.runtime.workers.place import WorkerPlace

NUMBERS = {"a": 0, "b": 1, "far": 2}


@pytest.mark.parametrize(
    ("transport", "between_machines"),
    [("shared_memory", "connection"), ("connection", "connection"), ("nccl", "nccl"), ("pigeon", "pigeon")],
)
def test_only_shared_memory_is_replaced_between_machines(transport: str, between_machines: str) -> None:
    """A name that is not known stays, and is refused by ``connect``."""
    connections: Any = {
        name: SimpleNamespace(place=WorkerPlace("two" if name == "far" else "one", name, "127.0.0.1"))
        for name in NUMBERS
    }
    paths = EdgePaths(connections, NUMBERS, [(0, 1), (1, 2)], transport)
    assert paths.transports == {(0, 1): transport, (1, 2): between_machines}


def test_each_name_of_a_transport_is_one_that_edges_know() -> None:
    assert set(get_args(TransportName)) == set(TRANSPORTS)
