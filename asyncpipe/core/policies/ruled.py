"""The policy of a compute lane where a rule decides, and which one pipeline has for itself."""

from __future__ import annotations

from heapq import heappop

from asyncpipe.core.policies.first_come import FirstComeFirstServed
from asyncpipe.core.policies.policy import Chosen, LaneView

__all__ = ["Ruled"]


class Ruled(FirstComeFirstServed):
    """The rule's lowest rank first, as late as can be: while the device holds ``ahead`` tasks, nothing is chosen.

    So each choice knows all that has happened. Whether a micro-batch may come to the device is for ``admit``, which the
    scheduler asks about what is chosen here (``microbatch_admission.py``). Steps without a rule, such as evaluations,
    do not wait.
    """

    def __init__(self, lane: LaneView) -> None:
        super().__init__()
        self._lane = lane

    @property
    def at_once(self) -> bool:
        return not self.heap or self.heap[0][3].graph.rule is None

    def choose(self, now: float) -> Chosen | None:
        if not self.heap:
            return None
        rule = self.heap[0][3].graph.rule
        if rule is not None and self._lane.in_flight >= rule.ahead:
            return None
        _, _, task, step = heappop(self.heap)
        return step, task

    def check(self, now: float) -> None:
        assert not self.heap or self._lane.in_flight, f"{self._lane.lane} has work and room, but stands still"
