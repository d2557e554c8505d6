"""Backfill: may a task of a background job run in a gap, or would the foreground need the lane before it is done?

A task cannot be taken back once it is handed over. So a background task is handed over only to a lane that is empty,
or behind one other background task, and only if no foreground task is expected there before it would end. What is
expected follows from what was measured:

- Within a step, from the task graph. A task that waits for the lane waits for tasks that are not done, those for
  others, back to tasks that run. If one such chain takes as long as the background task, there is time for it::

      lane 2   ▓B1▓ ·········?·········▓B2▓        B2 waits for C, C for B2 at stage 3, which runs until 14:
      lane 3        ▓▓▓▓ B2 ▓▓▓▓ ─C─▶  │           a background task that ends before 15 fits
                               14     15

- Between steps, from the job's earlier gaps on this lane: the time from the last task of a step to the first of the
  next one. While the next step is expected within the background task's duration, the lane stays free, and as long
  again if the step is late.

Limits. Times are means: where tasks differ much, a background task ends late, or one that had time is not begun. A
chain is a lower bound: it does not know what other jobs take on the way, nor the order where a rule decides. So some
idle time stays unused, more of it next to ruled schedules. The end of a gap is lost where no whole background task
fits: small tasks fill better, and a background task that is longer than any gap waits for a pause. Lanes are looked at
one by one: where one thread serves all lanes of a device, a background task may delay a copy. What is not known yet
holds nothing back: the first step of a job, a pipeline without a job's name, a backward that waits for its caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import inf
from typing import Protocol

from asyncpipe.core.graph.task import Lane
from asyncpipe.core.policies.policy import Chosen, LaneView, StepView, TaskState

__all__ = ["BackfillLookahead"]

_SLACK = 0.9
"""The part of a background task that must fit. Times are means, so half of the tasks that just fit would end late
anyway; with a tenth of slack more of them begin, and where one is late the foreground loses little."""
_MOST_VISITED = 256
"""Tasks looked at for one answer. A background task that is longer than so many others hardly fits anywhere."""


class BusyLane(Protocol):
    """What is known of a lane that tasks of named jobs run on."""

    @property
    def lane(self) -> LaneView:
        """How many tasks its device holds."""

    def busy(self, now: float, last: Chosen | None = None) -> tuple[float, float]:
        """(seconds until it is done with all that it holds, or with ``last``; when its first task should end)."""


class BackfillLookahead:
    """What can be said at one moment about when the foreground needs a lane. A query: it changes no state."""

    def __init__(self, now: float, lanes: Mapping[Lane, BusyLane]) -> None:
        self._now = now
        self._lanes = lanes
        self._duration = 0.0
        """Until the task that asks would end."""
        self._wanted = 0.0
        """The part of it that must fit."""
        self._visits_left = 0
        self._held_outside: dict[StepView, AbstractSet[int]] = {}
        """By step, what ``_gated`` has found."""
        self.wake_at: float | None = None
        """When an answer could be another one although nothing has happened: what was expected did not come."""

    def is_free(
        self,
        seconds: float,
        expected: Iterable[tuple[float | None, Iterable[tuple[StepView, Sequence[int]]]]],
        left: float = 0.0,
    ) -> bool:
        """Whether a task of so many seconds, which begins in ``left`` seconds, would end before the lane is needed.

        ``expected`` has for each job when its next step is due, and its steps under way with the waiting tasks of
        which one can be the next on the lane.
        """
        self._duration, self._wanted, self._visits_left = left + seconds, left + seconds * _SLACK, _MOST_VISITED
        return not any(
            self._comes_back(due) or any(self._needs_lane(step, waiting) for step, waiting in steps)
            for due, steps in expected
        )

    def look_again(self, at: float) -> bool:
        """Ask to be asked again at that time; false, since it is not that late yet."""
        self.wake_at = at if self.wake_at is None else min(self.wake_at, at)
        return False

    def _comes_back(self, due: float | None) -> bool:
        """Whether a job's next step may come before the task ends, and is not too late to wait for."""
        return due is not None and due < self._now + self._wanted and not self._is_overdue(due)

    def _is_overdue(self, due: float) -> bool:
        """Whether something is late by more than the task would take: then it can come at any time."""
        limit = due + self._duration
        return self._now >= limit or self.look_again(limit)

    def _needs_lane(self, step: StepView, waiting: Sequence[int]) -> bool:
        """Whether one of the step's ``waiting`` tasks may become ready before the task ends."""
        return step.running and any(not self._takes_long(step, task) for task in waiting)

    def _takes_long(self, step: StepView, task: int) -> bool:
        """Whether some chain of unfinished tasks before ``task`` takes as long as the task that asks.

        Walks the graph backwards from ``task``, deepest first and into the step before, which soon finds a long chain
        where there is one, and visits a task again only if it has found a longer way to it.
        """
        wanted = self._wanted
        furthest: dict[Chosen, float] = {(step, task): 0.0}
        stack: list[Chosen] = [(step, task)]
        while stack:
            self._visits_left -= 1
            if self._visits_left < 0:
                return False
            current = stack.pop()
            step, task = current
            if task in self._gated(step):
                return True
            before = [(step, earlier) for earlier in step.graph.dependencies[task]]
            if task in step.behind:
                before.append(step.behind[task])
            for awaited in before:
                state = awaited[0].states[awaited[1]]
                if state is TaskState.COMPLETED:
                    continue
                seconds = furthest[current] + self._seconds(*awaited, state)
                if seconds >= wanted:
                    return True
                if state is TaskState.WAITING and seconds > furthest.get(awaited, -1.0):
                    furthest[awaited] = seconds
                    stack.append(awaited)
        return False

    def _seconds(self, step: StepView, task: int, state: TaskState) -> float:
        """How long ``task`` keeps others waiting at least, from the moment at which it is ready or from now."""
        waiting = step.graph.tasks[task]
        if state in (TaskState.DISPATCHED, TaskState.ISSUED):
            return self._busy(waiting.lane, (step, task))
        seconds = step.job.expected(waiting)
        if seconds is None:
            return inf
        if state is TaskState.READY:
            # A rule may have refused it until a micro-batch leaves the device; when that is, is not known.
            refused = step.graph.rule is not None and not self._lanes[waiting.lane].lane.in_flight
            return inf if refused else seconds + self._busy(waiting.lane)
        return seconds

    def _busy(self, lane: Lane, last: Chosen | None = None) -> float:
        """The seconds until the lane is done with all that it holds, or with ``last``; infinite if that is not
        known."""
        seconds, first_ends = self._lanes[lane].busy(self._now, last)
        return inf if first_ends < inf and self._is_overdue(first_ends) else seconds

    def _gated(self, step: StepView) -> AbstractSet[int]:
        """The tasks that wait for something from outside: when that comes is not known."""
        if (found := self._held_outside.get(step)) is None:
            found = self._held_outside[step] = {step.graph.gates[gate] for gate in step.closed_gates}
        return found
