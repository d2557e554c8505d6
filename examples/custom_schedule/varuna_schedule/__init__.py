"""Varuna's rule (Athlur et al. 2022, arXiv 2111.04007) as a plug-in for asyncpipe.

A free device runs weight gradients first, then input gradients, then forwards. Running weight gradients first minimises
memory, not the bubble: zero-bubble schedules defer them to fill idle time. Change ``RANKS`` to compare.
"""

from __future__ import annotations

from typing import Any

from asyncpipe import Action, RuledSchedule, Shape, TaskKind

__all__ = ["Varuna"]

RANKS = {TaskKind.WEIGHT_GRADIENT: 0, TaskKind.INPUT_GRADIENT: 1, TaskKind.FORWARD: 2}


class Varuna(RuledSchedule):
    """A rule that runs W before I before F, with at most p micro-batches on a device."""

    name = "varuna"
    splits_backward = True

    def priority(self, action: Action, shape: Shape) -> Any:
        """By kind; among actions of a kind, the oldest micro-batch first."""
        return RANKS[action.kind], action.microbatch

    def admit(self, action: Action, live: int, shape: Shape) -> bool:
        """Allow as many micro-batches as there are devices."""
        return live < shape.devices
