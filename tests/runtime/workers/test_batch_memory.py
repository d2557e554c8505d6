"""Memory that a controller shares with a worker: what is put there comes out, and is used again when nobody has it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pickle import PickleBuffer

import pytest

from asyncpipe.runtime.task_board import new_memory
from asyncpipe.runtime.workers import batch_memory
from asyncpipe.runtime.workers.batch_memory import BatchMemory, BatchViews, Place

SIZE = 20_000
Ends = tuple[BatchMemory, BatchViews]


@pytest.fixture
def ends() -> Iterator[Ends]:
    descriptor = new_memory("test")
    memory, views = BatchMemory(descriptor), BatchViews(descriptor)
    os.close(descriptor)
    yield memory, views
    memory.close()
    views.close()


def filled(number: int, size: int = SIZE) -> PickleBuffer:
    return PickleBuffer(bytes([number]) * size)


def test_large_buffers_come_by_the_memory(ends: Ends) -> None:
    memory, views = ends
    sent = [filled(1), filled(2, 10), filled(3, 5 * SIZE)]
    put = memory.put(sent)
    assert [type(each) for each in put] == [Place, PickleBuffer, Place]
    assert [bytes(each) for each in views.views(put)] == [bytes(each) for each in sent]  # type: ignore[call-overload]


def test_memory_is_used_again_when_the_last_view_is_gone(ends: Ends) -> None:
    memory, views = ends
    kept = views.views(first := memory.put([filled(1)]))
    last = views.views(memory.put([filled(2)]))
    for number in range(3, 20):
        (view,) = views.views(put := memory.put([filled(number)]))
        assert put[0] not in first
        assert bytes(view) == bytes(filled(number))  # type: ignore[call-overload]
        del view
        freed = views.freed()
        assert freed == put
        memory.free(freed)
    assert [bytes(each) for each in (*kept, *last)] == [bytes(filled(1)), bytes(filled(2))]  # type: ignore[call-overload]
    assert views.freed() == []
    assert memory.size < 10 * SIZE


@pytest.mark.parametrize("is_closed", [False, True])
def test_without_memory_buffers_stay_as_they_are(ends: Ends, monkeypatch: pytest.MonkeyPatch, is_closed: bool) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    memory, _ = ends
    monkeypatch.setattr(batch_memory.os, "posix_fallocate", refuse)
    if is_closed:
        memory.close()
    assert memory.put(sent := [filled(1)]) == sent
