"""Varuna's rule (Athlur et al. 2022, arXiv 2111.04007) as a plug-in for asyncpipe.

A device that is free finishes what it has begun before it begins anything new: weight gradients first, then input
gradients, then forwards. Weight gradients first means the least memory, not the smallest bubble: zero-bubble schedules
put them off to fill idle time. Change ``RANKS`` and see.
"""

from __future__ import annotations

from typing import Any

from asyncpipe import Action, RuledSchedule, Shape, TaskKind

__all__ = ["Varuna"]

RANKS = {TaskKind.WEIGHT_GRADIENT: 0, TaskKind.INPUT_GRADIENT: 1, TaskKind.FORWARD: 2}


class Varuna(RuledSchedule):
    """Finish before you begin: W before I before F, with at most p micro-batches on a device."""

    name = "varuna"
    splits_backward = True

    def priority(self, action: Action, shape: Shape) -> Any:
        """The oldest micro-batch first among actions of a kind."""
        return RANKS[action.kind], action.microbatch

    def admit(self, action: Action, live: int, shape: Shape) -> bool:
        """At most as many micro-batches as there are devices."""
        return live < shape.devices
