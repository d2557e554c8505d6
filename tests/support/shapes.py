"""Shapes for tests of closed forms and gradients (a selection; all of a range with ``ASYNCPIPE_SHAPES=all``)."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from itertools import accumulate

from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.report import Report

__all__ = ["ALL", "DEVICES", "MICROBATCHES", "held"]

ALL = os.environ.get("ASYNCPIPE_SHAPES") == "all"
DEVICES: Sequence[int] = range(1, 9) if ALL else (1, 2, 3, 5)
MICROBATCHES: Sequence[int] = range(1, 17) if ALL else (1, 2, 3, 5, 6, 9)
"""Multiples of the devices, their neighbours, fewer than the devices, primes."""


def held(times: Report, ends: Collection[TaskKind]) -> list[int]:
    """Per device, the most (micro-batch, stage) that it holds at once, each from its forward to one of ``ends``."""
    most = []
    for device in times.device_busy:
        here = [time for time in times.tasks if time.task.lane.device == device]
        changes = [(time.start, 1) for time in here if time.task.kind is TaskKind.FORWARD]
        changes += [(time.end, -1) for time in here if time.task.kind in ends]
        most.append(max(accumulate(change for _, change in sorted(changes)), default=0))
    return most
