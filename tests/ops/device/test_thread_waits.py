"""Which threads a wait needs, while others begin and end theirs."""

from __future__ import annotations

from types import SimpleNamespace

from asyncpipe.ops.device.thread_waits import needed_threads


def test_a_wait_that_ends_while_it_is_looked_up_is_none():
    class Ending(dict):
        def __contains__(self, thread):
            return True  # It was there a moment ago.

    inner, outer = SimpleNamespace(threads={3}), SimpleNamespace(threads={1, 2})
    assert needed_threads(outer, Ending({2: inner})) == {1, 2, 3}
