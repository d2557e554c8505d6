"""NCCL where there is none: tensors of the host, by gloo, with streams and events that do what a device's do.

A transfer is queued and not waited for; an event has happened when what its stream had queued is over.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from asyncpipe.ops.edges import nccl
from asyncpipe.ops.edges.pair_store import PairStore

__all__ = ["FakeGroup", "replace_nccl"]


def replace_nccl(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(distributed, "is_nccl_available", lambda: True)
    patch.setattr(nccl, "_group", FakeGroup)
    patch.setattr(nccl, "AcceleratorStream", _Stream)
    patch.setattr(nccl, "record", _Event)


class _Stream:
    def __init__(self, device: torch.device) -> None:
        self.stream = self
        self.queued: list[_Work] = []

    def use(self) -> AbstractContextManager[None]:
        _current.stream = self
        return nullcontext()

    def wait(self, event: object) -> None:
        pass


_current = threading.local()


class _Event:
    def __init__(self, stream: Any) -> None:
        self._behind = list(getattr(stream, "queued", ()))

    def query(self) -> bool:
        return all(work.is_over for work in self._behind)

    def synchronize(self) -> None:
        for work in self._behind:
            work.over.result(20)


class _Work:
    def __init__(self, over: Future[bool]) -> None:
        self.over = over

    def wait(self) -> None:
        """As NCCL's: the current stream waits, not the host."""
        stream = _current.stream
        stream.queued = [each for each in stream.queued if not each.is_over] + [self]

    @property
    def is_over(self) -> bool:
        # A kernel of NCCL does not end because the other end is gone.
        return self.over.done() and self.over.result()


class FakeGroup:
    """A process group of two."""

    def __init__(self, store: PairStore, rank: int) -> None:
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._threads = 1
        options._timeout = timedelta(seconds=20)
        try:
            self._group = gloo(store, rank, 2, options)
        finally:
            del options  # It has sockets, and a traceback would keep it.
        self._peer = 1 - rank
        self._waiter = ThreadPoolExecutor(1)
        self.is_aborted = False

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        return self._queue(self._group.send, tensors, peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        return self._queue(self._group.recv, tensors, peer)

    def _queue(self, transfer: Any, tensors: list[torch.Tensor], peer: int) -> _Work:
        if self.is_aborted:
            raise RuntimeError("the communicator was aborted")
        work = transfer(tensors, peer, 0)

        def wait(_: list[torch.Tensor]) -> bool:
            try:
                return bool(work.wait(timedelta(days=1)))
            except RuntimeError:
                return False

        return _Work(self._waiter.submit(wait, tensors))

    def get_error(self) -> SimpleNamespace:
        return SimpleNamespace(name="SUCCESS")

    def abort(self) -> None:
        self.is_aborted = True
        with suppress(RuntimeError):  # After a timeout of one operation gloo ends all of them.
            self._group.recv([torch.empty(1)], self._peer, 1).wait(timedelta(milliseconds=1))
        self._waiter.shutdown()
