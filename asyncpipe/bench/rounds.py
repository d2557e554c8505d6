"""What benchmarks share that compare times: a thread to run an arm on, and medians over alternating rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median

from torch import nn

from asyncpipe.ops.device.intra_op_threads import IntraOpThreads

__all__ = ["drop_gradients", "lone_thread", "medians"]


@contextmanager
def lone_thread() -> Iterator[ThreadPoolExecutor]:
    """A pool of one thread that has one intra-op thread, as a CPU device's thread has."""
    threads = IntraOpThreads(1)
    with ThreadPoolExecutor(1, initializer=threads.initializer()) as pool:
        pool.submit(int).result()
        threads.settle()
        yield pool


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of every column; all rounds have the same ones."""
    return {name: median(row[name] for row in rounds) for name in rounds[0]}


def drop_gradients(model: nn.Module) -> None:
    """No parameter has a gradient, as after ``zero_grad()`` of an optimizer."""
    for parameter in model.parameters():
        parameter.grad = None
