"""First come, first served: the policy of a lane that one pipeline has for itself and whose order is in the graph."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TypeVar

from asyncpipe.core.engine.policies.policy import Chosen, Policy, StepView

__all__ = ["FirstComeFirstServed"]

P = TypeVar("P", bound=Policy)


class FirstComeFirstServed(Policy):
    """Older steps first, then lower ranks: a task's rank is its number (its clock cycle), or what a rule says.

    It waits for nothing, so the scheduler asks it at once, and tells it nothing but what is ready.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, StepView]] = []
        """(step number, rank, task, step); no two have the same number and rank."""

    @property
    def at_once(self) -> bool:
        return True

    def ready(self, step: StepView, task: int, now: float) -> None:
        rule = step.graph.rule
        heappush(self._heap, (step.number, task if rule is None else rule.ranks[task], task, step))

    def choose(self, now: float) -> Chosen | None:
        if not self._heap:
            return None
        _, _, task, step = heappop(self._heap)
        return step, task

    def drop(self, step: StepView) -> None:
        self._heap = [entry for entry in self._heap if entry[3] is not step]
        heapify(self._heap)

    @property
    def first(self) -> Chosen | None:
        """What ``choose`` would answer."""
        if not self._heap:
            return None
        _, _, task, step = self._heap[0]
        return step, task

    def __len__(self) -> int:
        """How many tasks are ready."""
        return len(self._heap)

    def hand_over(self, policy: P) -> P:
        """Give every ready task to ``policy``, which takes the lane over; returns it."""
        entries, self._heap = sorted(self._heap), []
        for _, _, task, step in entries:
            policy.ready(step, task, 0.0)
        return policy
