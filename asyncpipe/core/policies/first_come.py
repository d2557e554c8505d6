"""First come, first served: the policy of a lane that one pipeline has for itself."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TypeVar

from asyncpipe.core.policies.policy import Chosen, LaneView, Policy, StepView

__all__ = ["FirstComeFirstServed"]

P = TypeVar("P", bound=Policy)


class FirstComeFirstServed(Policy):
    """Older steps first, then lower ranks: a task's rank is its number (its clock cycle), or what a rule says.

    Where the order is in the graph, it decides nothing, so the dispatcher works on its ``heap`` itself: a pipeline that
    is alone pays for no call.

    Where a rule decides, it is given its lane, and chooses as late as can be: while the device holds ``ahead`` tasks,
    nothing is chosen, so that each choice knows all that has happened. Whether a micro-batch may come to the device is
    for ``admit``, which the scheduler asks about what is chosen here (``microbatch_admission.py``). Steps without a
    rule, such as evaluations, do not wait.
    """

    def __init__(self, ruled_lane: LaneView | None = None) -> None:
        self.heap: list[tuple[int, int, int, StepView]] = []
        """(step number, rank, task, step) of ready tasks; no two have the same number and rank. Always this list."""
        self.ruled_lane = ruled_lane
        """The lane, if a rule decides there."""

    @property
    def at_once(self) -> bool:
        return self.ruled_lane is None or not self.heap or self.heap[0][3].graph.rule is None

    def ready(self, step: StepView, task: int, now: float) -> None:
        rule = step.graph.rule
        heappush(self.heap, (step.number, task if rule is None else rule.ranks[task], task, step))

    def choose(self, now: float) -> Chosen | None:
        if not self.heap:
            return None
        if self.ruled_lane is not None:
            rule = self.heap[0][3].graph.rule
            if rule is not None and self.ruled_lane.in_flight >= rule.ahead:
                return None
        _, _, task, step = heappop(self.heap)
        return step, task

    def drop(self, step: StepView) -> None:
        self.heap[:] = [entry for entry in self.heap if entry[3] is not step]
        heapify(self.heap)

    def hand_over(self, policy: P) -> P:
        """Give every ready task to ``policy``, which takes the lane over; returns it."""
        while self.heap:
            _, _, task, step = heappop(self.heap)
            policy.ready(step, task, 0.0)
        return policy
