"""The arithmetic of credits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncpipe.ops.edges.window import Window


@given(st.integers(1, 20), st.lists(st.integers(0, 40)), st.data())
def test_a_sender_neither_overruns_nor_waits_in_vain(size: int, sends: list[int], data: st.DataObject) -> None:
    window = Window(size)
    known = sent = told = 0

    def tell() -> None:
        nonlocal known, told
        if window.due():
            known = window.tell()
            told += 1

    tell()
    for wanted in sends:
        for _ in range(min(wanted, known - sent)):
            sent += 1
            assert window.arrive()
            tell()
        assert window.held <= size
        # A sender that has used what it knows of has filled the window.
        assert sent < known or window.held == size
        for _ in range(data.draw(st.integers(0, window.held))):
            window.release()
            tell()
    assert told <= 1 + 2 * sent // max(1, size // 2) + sent // size + 1
