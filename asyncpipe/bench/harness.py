"""What the benchmarks share: rounds of alternating arms, times, medians, tables, and small models.

A benchmark compares arms. The arms run in turn within each round, in one process, so that whatever else the machine
does hits all of them; the figures are medians over the rounds, without those that warm up.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from torch import nn

from asyncpipe.bench import Progress
from asyncpipe.ops.device.intra_op_threads import IntraOpThreads
from asyncpipe.runtime.portal import new_event_loop

__all__ = [
    "alternating",
    "busy_processes",
    "interrupts_blocked",
    "lone_thread",
    "medians",
    "mlp",
    "rollup_bytes",
    "rounds",
    "run_on_loop",
    "seconds_of",
    "status_bytes",
    "table",
    "worker_pids",
]

_T = TypeVar("_T")


def run_on_loop(main: Coroutine[Any, Any, _T]) -> _T:
    """The result of ``main``, on the kind of event loop that the package uses."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def rounds(count: int, progress: Progress, what: str = "round") -> Iterator[int]:
    """The numbers of ``count`` rounds from 0; ``progress`` is told of each."""
    for number in range(count):
        progress(f"{what} {number + 1} of {count}")
        yield number


def alternating(arms: Sequence[_T], number: int) -> Sequence[_T]:
    """The arms in the order of round ``number``: every other round reverses it, so that no arm is always first."""
    return arms if number % 2 else arms[::-1]


def seconds_of(work: Callable[[], object]) -> float:
    """The seconds that ``work`` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of every column; all rows have the same columns."""
    return {name: median(row[name] for row in rows) for name in rows[0]}


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines with the columns of ``rows`` aligned: the first to the left, the others to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


@contextmanager
def lone_thread() -> Iterator[ThreadPoolExecutor]:
    """A pool of one thread with one intra-op thread, like the thread of a CPU device."""
    threads = IntraOpThreads(1)
    with ThreadPoolExecutor(1, initializer=threads.initializer()) as pool:
        pool.submit(int).result()
        threads.wait()
        yield pool


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Let ``count`` other processes compute without a pause during the block. They also end with this process."""
    with ExitStack() as stack:
        for _ in range(count):
            command = [sys.executable, "-c", _BUSY]
            process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))  # noqa: S603 - from here
            stack.callback(process.kill)
        yield


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Processes that start in the block never see Ctrl-C, which goes to all of a terminal; this one sees it behind."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_BUSY = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.SIG_IGN)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True:
    pass
"""
"""Ends when its standard input does, which is when whoever started it ends, in whatever way."""


def status_bytes(pid: int, key: str) -> int:
    """A line of what the kernel says about a process (``VmRSS``, ``VmHWM``), in bytes. Linux only."""
    return _kernel_bytes(Path(f"/proc/{pid}/status"), key)


def rollup_bytes(pid: int, key: str) -> int:
    """A sum over the mappings of a process (``Rss``; ``Pss``: shared memory counts in parts), in bytes. Linux only."""
    return _kernel_bytes(Path(f"/proc/{pid}/smaps_rollup"), key)


def _kernel_bytes(file: Path, key: str) -> int:
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise LookupError(key)


def mlp(width: int, layers: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """``layers`` times a linear layer of ``width`` with an activation behind it."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), activation()) for _ in range(layers)))


def worker_pids(pid: int) -> list[int]:
    """Its workers, which may be children of the process that they are forked from."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            listed = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"asyncpipe/worker" in listed:
                found += worker_pids(child) if b"fork server" in listed else [child]
    return found
