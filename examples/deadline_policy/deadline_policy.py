"""A policy of one's own: of several jobs on the same devices, the one whose deadline comes first goes first."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from heapq import heapify, heappop, heappush
from math import inf

from asyncpipe import LaneView, Policy, StepView

__all__ = ["EarliestDeadlineFirst", "by_deadline"]


class EarliestDeadlineFirst(Policy):
    """Tasks of the job with the earliest deadline first; a job without one comes last."""

    def __init__(self, lane: LaneView, deadlines: Mapping[str, float]) -> None:
        self._lane = lane
        self._deadlines = deadlines
        self._ready: list[tuple[float, int, int, StepView]] = []

    def ready(self, step: StepView, task: int, now: float) -> None:
        heappush(self._ready, (self._deadlines.get(step.job.name, inf), step.number, task, step))

    def choose(self, now: float) -> tuple[StepView, int] | None:
        # A device cannot give a task back. Two keep it busy; a third would only stand in front of an urgent one.
        if not self._ready or self._lane.in_flight >= 2:
            return None
        _, _, task, step = heappop(self._ready)
        return step, task

    def drop(self, step: StepView) -> None:
        self._ready = [entry for entry in self._ready if entry[3] is not step]
        heapify(self._ready)


def by_deadline(**deadlines: float) -> partial[EarliestDeadlineFirst]:
    """For ``DevicePool(policy=by_deadline(urgent=1.5, nightly=6.0))``: deadlines by job name, in any unit."""
    return partial(EarliestDeadlineFirst, deadlines=deadlines)
