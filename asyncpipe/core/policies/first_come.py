"""First come, first served: the policy of a lane that one pipeline has for itself and whose order is in the graph."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TypeVar

from asyncpipe.core.policies.policy import Chosen, Policy, StepView

__all__ = ["FirstComeFirstServed"]

P = TypeVar("P", bound=Policy)


class FirstComeFirstServed(Policy):
    """Older steps first, then lower ranks: a task's rank is its number (its clock cycle), or what a rule says.

    It decides nothing, so the dispatcher works on its ``heap`` itself: a pipeline that is alone pays for no call.
    """

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, int, StepView]] = []
        """(step number, rank, task, step) of ready tasks; no two have the same number and rank. Always this list."""

    @property
    def at_once(self) -> bool:
        return True

    def ready(self, step: StepView, task: int, now: float) -> None:
        rule = step.graph.rule
        heappush(self.heap, (step.number, task if rule is None else rule.ranks[task], task, step))

    def choose(self, now: float) -> Chosen | None:
        if not self.heap:
            return None
        _, _, task, step = heappop(self.heap)
        return step, task

    def drop(self, step: StepView) -> None:
        self.heap[:] = [entry for entry in self.heap if entry[3] is not step]
        heapify(self.heap)

    def hand_over(self, policy: P) -> P:
        """Give every ready task to ``policy``, which takes the lane over; returns it."""
        while (chosen := FirstComeFirstServed.choose(self, 0.0)) is not None:
            policy.ready(*chosen, 0.0)
        return policy
