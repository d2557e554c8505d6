"""What is different where tensors travel by NCCL, which is imitated here: ends that wait for nothing but each other."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
import torch
from edge_helpers import joined, message, nothing_left
from torch import distributed

from asyncpipe.errors import EdgeError
from asyncpipe.ops.edges import nccl
from asyncpipe.ops.edges.nccl import NcclIn, NcclOut

ABORTED = "a transfer by NCCL was aborted: the other end is gone, or this one closes"


def test_a_peer_that_goes_between_a_header_and_its_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its transfer would never end, so it is aborted."""
    monkeypatch.setattr(nccl, "GRACE_SECONDS", 0.05)

    def go(self: NcclOut, *_: object) -> None:
        raise ConnectionError("as if it were killed")

    monkeypatch.setattr(NcclOut, "follow", go)
    with nothing_left(), joined(transport="nccl") as pair:
        pair.out.send(message(1, torch.zeros(9)))
        errors = sorted(str(pair.inboxes[worker].error()) for worker in (0, 1))
        assert errors[0].endswith("ConnectionAbortedError: " + ABORTED)
        assert errors[1].endswith("ConnectionError: as if it were killed")
        assert pair.inbox.empty


def test_closing_while_a_payload_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the sender were stopped between a header and its payload."""
    monkeypatch.setattr(NcclOut, "follow", lambda *_: None)
    taking = threading.Event()
    take = NcclIn.receive
    monkeypatch.setattr(NcclIn, "receive", lambda *arguments: taking.set() or take(*arguments))
    with nothing_left(), joined(transport="nccl") as pair:
        pair.out.send(message(1, torch.zeros(9)))
        assert taking.wait(20)
        pair.edges[1].close()
        assert pair.inbox.empty


def test_the_watchdog_of_a_group_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    seen = []

    class Group:
        def __init__(self, store: object, rank: int, size: int, options: SimpleNamespace) -> None:
            seen.append((os.environ[nccl.ERRORS], options.config.max_ctas, rank, size))

        @staticmethod
        def Options() -> SimpleNamespace:
            return SimpleNamespace(config=SimpleNamespace())

    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv(nccl.ERRORS, "3")
    REAL_GROUP(None, 1)
    assert seen == [("0", nccl.MOST_BLOCKS, 1, 2)]
    assert os.environ[nccl.ERRORS] == "3"


REAL_GROUP = nccl._group
"""Before it is replaced: what it tells torch cannot be seen elsewhere."""


def test_a_torch_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: False)
    with pytest.raises(EdgeError, match="this torch has no NCCL"), joined(transport="nccl"):
        pass
