"""Threads or processes for the devices of a pipeline (``workers="auto"``), from what a step was measured to take.

The threads of one process share the interpreter's lock, which is held for most of a task's processor time on an
accelerator: while a thread queues kernels, others wait. What processes cost instead is fixed, tens of microseconds a
message, so they pay where the lock is busy::

    busy = (tasks per second) × (processor time of a task)      threads below BUSY, processes from there
"""

from __future__ import annotations

__all__ = ["BUSY", "threads_or_processes"]

BUSY = 0.6
"""The share of a step's time for which threads may hold the interpreter's lock. If they ask for it at random, each
waits for it 1.5 times as long as it then holds it; 4 times at a share of 0.8 (M/M/1: busy / (1 - busy))."""


def threads_or_processes(devices: int, tasks: int, processor: float, seconds: float) -> tuple[str, str]:
    """The value of ``workers``, and why: a step of so many ``tasks`` takes ``seconds``, and ``processor`` seconds of
    processor time in this process."""
    busy = processor / seconds
    workers = "threads" if busy < BUSY else "processes"
    return workers, (
        f"{tasks} tasks in {seconds * 1e3:.3g} ms on {devices} devices, each with {processor / tasks * 1e6:.3g} µs of "
        f"processor time, keep the interpreter's lock {busy:.0%} busy ({workers}: "
        f"{'less than' if workers == 'threads' else 'at least'} {BUSY:.0%})"
    )
