"""What benchmarks share beside ``asyncpipe/bench/harness.py``: the order of arms, and processes without Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["alternating", "interrupts_blocked"]

_T = TypeVar("_T")


def alternating(arms: Sequence[_T], number: int) -> Sequence[_T]:
    """The arms in the order of round ``number``: every other round reverses it, so that no arm is always first."""
    return arms if number % 2 else arms[::-1]


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Processes that start in the block never see Ctrl-C, which goes to all of a terminal; this one sees it behind."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
