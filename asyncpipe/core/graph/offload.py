"""Which micro-batches are offloaded at each stage: those whose backward is furthest behind their forward.

An activation is of no use to its device between its forward and its backward. How long that is in actions of the
device, its *wait*, follows from the order alone. An offload takes the time of the action after the forward, and a load
that of the action before the backward; so the memory is free in between, if the wait is long enough::

    1F1B, first of 4    F0 F1 F2 F3 B0 F4 B1 F5 B2 …          F0 waits for 3 actions, F1 for 4, every later one for 5
    on the device       ├─0─┤     ├─0─┤                       free while F2 runs
                           ├─1─┤  …    ├─1─┤
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any

from asyncpipe.core.kinds import INPUT_GRADIENT_KINDS, TaskKind
from asyncpipe.core.schedules.protocol import Action
from asyncpipe.errors import OptionError

__all__ = ["AHEAD", "HOLD", "LEAST_WAIT", "check_offload", "offloaded"]

HOLD = 1
"""How many actions an offload may take: the one after them waits for it, since it gets the memory."""
AHEAD = 1
"""How many actions before a backward its load begins."""
LEAST_WAIT = HOLD + AHEAD + 1
"""The wait from which on an offload frees memory for an action."""


def check_offload(given: object, stages: int | None = None) -> tuple[float, ...]:
    """The fraction of each stage, from one number for all ``stages`` (or one entry, if these are not known), or a list.

    Raises ``OptionError`` for what is no fraction, and for a list of another length.
    """
    row: tuple[Any, ...] = tuple(given) if isinstance(given, list | tuple) else (given,) * (stages or 1)
    for each in row:
        if isinstance(each, bool) or not isinstance(each, int | float) or not 0 <= each <= 1:
            raise OptionError(
                "offload must be 'auto', or the fraction of micro-batches that are offloaded, from 0 to 1, or a list "
                f"with that of each stage; got {given!r}"
            )
    if stages not in (None, len(row)):
        raise OptionError(f"offload must have a fraction for each of {stages} stages, got {list(row)}")
    return row


def offloaded(order: Sequence[Action], fractions: Sequence[float]) -> list[tuple[int, int]]:
    """The (micro-batch, stage) that a device offloads, given its actions and the fraction of each stage.

    A fraction is of all micro-batches, rounded up. Those that wait longest are chosen, of equals the earlier ones, and
    none that waits for less than ``LEAST_WAIT`` actions: the last micro-batches of the last stage never are.
    """
    waits = _waits(order)
    chosen: list[tuple[int, int]] = []
    for stage in dict.fromkeys(stage for _, stage in waits):
        mine = sorted((-wait, i) for (i, at), wait in waits.items() if at == stage)
        # What is computed from a number of micro-batches must give that number again.
        count = ceil(fractions[stage] * len(mine) - 1e-6)
        chosen += [(i, stage) for wait, i in mine[:count] if -wait >= LEAST_WAIT]
    return sorted(chosen)


def _waits(order: Iterable[Action]) -> dict[tuple[int, int], int]:
    """By micro-batch and stage, how many actions of the device are between forward and backward."""
    made: dict[tuple[int, int], int] = {}
    waits: dict[tuple[int, int], int] = {}
    for position, (kind, microbatch, stage) in enumerate(order):
        if kind is TaskKind.FORWARD:
            made[microbatch, stage] = position
        elif kind in INPUT_GRADIENT_KINDS:
            waits[microbatch, stage] = position - made[microbatch, stage] - 1
    return waits
