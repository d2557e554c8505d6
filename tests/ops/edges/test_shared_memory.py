"""Messages in shared memory: when their places are used again, and what is said where there is no memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest
import torch
from edge_helpers import nothing_left
from torch import Tensor

from asyncpipe.ops.edges.message import MessageLayout, layout_of
from asyncpipe.ops.edges.shared_memory import SharedMemoryIn, SharedMemoryOut
from asyncpipe.shared_memory import new_memory


class Ends:
    """Both ends, without an edge between."""

    def __init__(self) -> None:
        descriptor = new_memory("asyncpipe-edge")
        self.out = SharedMemoryOut(descriptor)
        self.into = SharedMemoryIn(descriptor)
        os.close(descriptor)

    def send(self, *tensors: Tensor) -> tuple[int, list[Tensor | None]]:
        """The slot, and what arrives."""
        layout = MessageLayout(b"", tuple(map(layout_of, tensors)))
        slot = self.out.place(layout, tensors)
        received, ready = self.into.take(layout, slot)
        assert ready is None
        return slot, received

    def give_back(self) -> list[int]:
        freed = self.into.freed()
        self.out.returned(freed)
        return freed


@pytest.fixture
def ends() -> Iterator[Ends]:
    with nothing_left():
        ends = Ends()
        yield ends
        ends.out.close()
        ends.into.close()


def test_a_place_is_used_again_when_its_last_tensor_is_gone(ends: Ends) -> None:
    slot, (a, b) = ends.send(torch.ones(9000), torch.ones(3, dtype=torch.int16))
    assert b is not None
    part = b[1:]
    del a, b
    assert ends.give_back() == []
    other, received = ends.send(torch.zeros(9000))
    assert other != slot
    assert part.tolist() == [1, 1]
    del part
    assert ends.give_back() == [slot]
    assert ends.send(torch.ones(8000))[0] == slot
    assert received[0] is not None
    assert not received[0].any()


def test_no_memory(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="no space"):
        ends.send(torch.zeros(9000))
