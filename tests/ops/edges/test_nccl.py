"""What is different where tensors travel by NCCL, which is imitated here: ends that wait for nothing but each other."""

from __future__ import annotations

import gc
import os
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from edge_helpers import joined, message, nothing_left
from fake_nccl import FakeGroup
from severed import sever
from torch import distributed

from asyncpipe.errors import EdgeError
from asyncpipe.ops.edges import nccl
from asyncpipe.ops.edges.pair_store import PairStore


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where a worker would end itself."""
    found: list[str] = []
    monkeypatch.setattr(nccl, "_end_process", lambda: found.append("ended"))
    return found


def no_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the sender were stopped between a header and its payload."""
    begin = nccl._Communicator.begin

    def begin_receives(self: Any, tensors: Any) -> torch.Event:
        return begin(self, tensors if self._peer == nccl.SENDER else [])

    monkeypatch.setattr(nccl._Communicator, "begin", begin_receives)


@pytest.mark.promise("GPUs", "A worker ends itself rather than compute with an NCCL transfer that never arrived.")
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_worker_ends_where_a_lane_waits_for_what_never_comes(
    monkeypatch: pytest.MonkeyPatch, ended: list[str], is_closed: bool
) -> None:
    """To abort the transfer would let the lane compute with it."""
    monkeypatch.setattr(nccl, "GRACE_SECONDS", 0.05)
    with nothing_left(), joined(transport="nccl") as pair:
        no_sends(monkeypatch)
        pair.out.send(message(1, torch.zeros(9)))
        received = pair.inbox.take(wait=False)
        if is_closed:
            pair.edges[1].close()
        else:
            sever(pair.into)
            pair.inboxes[1].error()
        assert ended == ["ended"]
        del received


def test_the_watchdog_of_a_group_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    seen = []

    class Group:
        def __init__(self, store: object, rank: int, size: int, options: SimpleNamespace) -> None:
            names = (nccl.ERRORS, "TORCH_NCCL_ENABLE_MONITORING")
            seen.append((*map(os.environ.get, names), options.config.max_ctas, rank, size))

        @staticmethod
        def Options() -> SimpleNamespace:
            return SimpleNamespace(config=SimpleNamespace())

    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv(nccl.ERRORS, "3")
    REAL_GROUP(None, 1)
    assert seen == [("0", "0", nccl.MOST_BLOCKS, 1, 2)]
    assert os.environ[nccl.ERRORS] == "3"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ


REAL_GROUP = nccl._group
"""Before it is replaced: what it tells torch cannot be seen elsewhere."""


def test_the_store_is_there_as_long_as_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's threads use it, and have no reference to what is Python's of it."""
    stores: list[weakref.ref[PairStore]] = []

    def group(store: PairStore, rank: int) -> FakeGroup:
        stores.append(weakref.ref(store))
        return FakeGroup(store, rank)

    monkeypatch.setattr(nccl, "_group", group)
    with joined(transport="nccl"):
        gc.collect()
        assert [store() is not None for store in stores] == [True] * 4
    gc.collect()
    assert not any(store() for store in stores)


def test_a_torch_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: False)
    with pytest.raises(EdgeError, match="this torch has no NCCL"), joined(transport="nccl"):
        pass
