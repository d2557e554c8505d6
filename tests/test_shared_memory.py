"""Memory that two processes share: what is put there comes out, and is used again when nobody has it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from pickle import PickleBuffer

import pytest

from asyncpipe.shared_memory import Place, SharedPool, SharedViews, new_memory

SIZE = 20_000
Ends = tuple[SharedPool, SharedViews]


@pytest.fixture
def ends() -> Iterator[Ends]:
    descriptor = new_memory("test")
    memory, views = SharedPool(descriptor), SharedViews(descriptor)
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
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    if is_closed:
        memory.close()
    assert memory.put(sent := [filled(1)]) == sent
    with pytest.raises(OSError, match="is closed" if is_closed else "no space"):
        memory.allocate(SIZE)


def test_a_place_that_is_not_there_is_refused(ends: Ends) -> None:
    with pytest.raises(ValueError, match="beyond the 0 bytes") as refused:
        ends[1].view(Place(0, SIZE))
    del refused


def test_a_place_that_is_freed_twice_is_not_the_one_that_has_its_memory_since(ends: Ends) -> None:
    memory, _ = ends
    first, _ = memory.allocate(SIZE)
    memory.free([first, first])
    again, _ = memory.allocate(SIZE)
    memory.free([first])
    other, _ = memory.allocate(SIZE)
    assert again.start == first.start != other.start


def test_memory_is_unmapped_when_nobody_uses_it() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:unmapped")

    descriptor = new_memory("unmapped")
    memory, views = SharedPool(descriptor), SharedViews(descriptor)
    os.close(descriptor)
    place, written = memory.allocate(SIZE)
    view = views.view(place)
    assert mapped() == 2
    memory.close()
    views.close()
    views.close()
    del written
    assert mapped() == 1
    del view
    assert mapped() == 0
