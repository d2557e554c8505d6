"""Segments: which are used again, which go, and how long they live."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from edge_helpers import nothing_left
from torch import Tensor

from asyncpipe.ops.edges import shared_memory
from asyncpipe.ops.edges.message import MessageLayout, layout_of
from asyncpipe.ops.edges.payload import SlotNews
from asyncpipe.ops.edges.shared_memory import SharedMemoryIn, SharedMemoryOut


class Ends:
    """Both ends, without an edge between."""

    def __init__(self) -> None:
        self.out = SharedMemoryOut()
        self.into = SharedMemoryIn()
        self.news: list[SlotNews] = []

    def send(self, *tensors: Tensor) -> tuple[int, list[Tensor | None]]:
        """The slot, and what arrives."""
        layout = MessageLayout(b"", tuple(map(layout_of, tensors)))
        slot = self.out.place(layout, tensors)
        for news in self.out.news():
            self.news.append(news)
            self.into.hear(news)
        received, ready = self.into.take(layout, slot)
        assert ready is None
        return slot, received

    def give_back(self) -> list[int]:
        freed = self.into.freed()
        self.out.returned(freed)
        return freed

    def close(self) -> None:
        self.out.close()
        self.into.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with nothing_left():
        ends = Ends()
        yield ends
        ends.close()


def test_a_segment_is_used_again_when_its_last_tensor_is_gone(ends: Ends) -> None:
    slot, (a, b) = ends.send(torch.ones(9000), torch.ones(3, dtype=torch.int16))
    part = b[1:]
    del a, b
    assert ends.give_back() == []
    other, received = ends.send(torch.zeros(9000))
    assert other != slot
    assert part.tolist() == [1, 1]
    del part
    assert ends.give_back() == [slot]
    assert ends.send(torch.zeros(9100))[0] == slot  # Of about the same size.
    assert not received[0].any()


def test_a_segment_is_unmapped_when_nobody_uses_it() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text(encoding="utf-8").count("asyncpipe-edge")

    ends = Ends()
    before = mapped()
    _, received = ends.send(torch.ones(9000))
    assert mapped() == before + 2
    ends.close()
    assert mapped() == before + 1
    received.clear()
    assert mapped() == before


def test_segments_of_other_sizes_go_when_memory_would_grow(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "KEPT_BYTES", 1 << 16)
    small, middle, large, other = (torch.zeros(1 << bits) for bits in (14, 16, 18, 12))
    for each in (small, middle, large):
        del ends.send(each)[1][:]
        ends.give_back()
    # When the third one came, both others were free, which was more than had been in use at a time.
    kib = 1 << 10
    assert [(each.slot, each.size) for each in ends.news] == [(1, 64 * kib), (2, 256 * kib), (1, 0), (3, 1024 * kib)]
    assert ends.send(middle)[0] == 2
    ends.give_back()
    assert ends.send(other)[0] == 4
    assert [(each.slot, each.size) for each in ends.news[4:]] == [(2, 0), (4, 16 * kib)]


def test_no_memory(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="no space"):
        ends.send(torch.zeros(9000))
    monkeypatch.undo()
    with pytest.raises(OSError, match=r"no memory for a segment of 1152921504606846976 bytes"):
        shared_memory._mapped(1, 1 << 60)
