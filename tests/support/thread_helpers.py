"""Functions on threads of their own, whose ends are waited for with a deadline; and asyncpipe's own threads."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable

import pytest

__all__ = ["HOLDS_THE_LOCK", "Threads", "join_all", "run_all", "threads_of_asyncpipe"]

SECONDS = 30.0

HOLDS_THE_LOCK = pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(),
    reason="this interpreter has no lock: a task that would hold it freezes no other thread",
)
"""For tests in which a thread holds the interpreter's lock."""


class Threads:
    """Runs functions on threads of their own, and keeps what they return or raise."""

    def __init__(self, *functions: Callable[[], object]) -> None:
        self.results: list[object] = [None] * len(functions)
        self._threads = [threading.Thread(target=self._run, args=item, daemon=True) for item in enumerate(functions)]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int, function: Callable[[], object]) -> None:
        try:
            self.results[index] = function()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.results[index] = error

    def join(self) -> list[object]:
        join_all(self._threads)
        return self.results


def run_all(*functions: Callable[[], object]) -> list[object]:
    """What ``functions`` return or raise on threads of their own that begin at the same time."""
    barrier = threading.Barrier(len(functions))

    def begin(function: Callable[[], object]) -> object:
        barrier.wait(SECONDS)
        return function()

    return Threads(*[lambda function=function: begin(function) for function in functions]).join()


def threads_of_asyncpipe() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("asyncpipe")}


def join_all(threads: Iterable[threading.Thread]) -> None:
    until = time.monotonic() + SECONDS
    for thread in threads:
        # In short waits: without the interpreter's lock, what this thread has made and another one drops last, a pool
        # that ends its threads for instance, is freed here when this thread runs.
        while thread.is_alive() and time.monotonic() < until:
            thread.join(0.05)
        assert not thread.is_alive()
