"""Looking ahead for background jobs: will the foreground need a lane before a background task would be over?

A task cannot be taken back once it has begun. So a background task runs only where the lane is empty and no
foreground task is expected there before it would end. What is expected comes from what was measured:

- Within a step, from the task graph. Whatever waits for the lane waits for tasks that are not done, those for others,
  back to tasks that run; if one such chain takes as long as the background task, there is time for it::

      lane 2   ▓B1▓ ·········?·········▓B2▓        B2 waits for C, C for B2 at stage 3, which runs until 14:
      lane 3        ▓▓▓▓ B2 ▓▓▓▓ ─C─▶  │           a background task that ends before 15 fits
                               14     15

- Between steps, from the job's habits: the time that passed on this lane from the last task of one step to the first
  of the next, the median of the last few times. While the job is expected within the background task's duration the
  lane stays free, and as long again if it is late.

Where it loses. Times are means: where tasks differ much from one to the next, a background task is over late, or one
that had time is not begun. A chain is a lower bound, which knows nothing of what other jobs take on the way, nor of
order where a rule decides; so some time stays unused, more next to ruled schedules than next to ordered ones. The end
of each gap is lost where no whole background task fits: small tasks fill better, and a background task that is longer
than any gap waits for a pause. Lanes are looked at one by one: where one thread serves all lanes of a device, a
background task may hold up a copy. What is not known yet (the first step of a job, a pipeline that names no job, a
backward that waits for its caller) holds nobody back.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from asyncpipe.core.engine.events import Outcome
from asyncpipe.core.engine.lanes import Claim, LaneState
from asyncpipe.core.engine.state import StepState, TaskState

__all__ = ["Outlook"]

_SLACK = 0.9
"""The part of a background task that must fit. Times are means, so that half of the tasks that fit just so would be
over late anyhow; with a tenth of slack more of them are begun, and where one is late the foreground loses little."""
_MOST_VISITED = 256
"""Tasks looked at for one answer. A background task that is longer than so many others hardly fits anywhere."""


class Outlook:
    """What can be said at one moment about when the foreground needs a lane."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._patience = 0.0
        self._left = 0
        self.again = inf
        """When an answer could be another one although nothing has happened: somebody was expected and did not come."""

    def is_free(self, others: Iterable[Claim], seconds: float) -> bool:
        """Whether nothing of ``others``, claims on one lane, is expected for ``seconds``."""
        self._patience, self._left = seconds, _MOST_VISITED
        return not any(
            self._is_back(claim) or any(self._has_next(visit.step, visit.waiting()) for visit in claim.visits)
            for claim in others
        )

    def _is_back(self, claim: Claim) -> bool:
        """Whether the next step of the claim's job may come, and is not later than we wait for it."""
        due = claim.due
        return due is not None and due < self._now + self._patience * _SLACK and not self._is_late(due)

    def _is_late(self, due: float) -> bool:
        """Whether what was due is overdue for longer than the background task would take: it can come at any time."""
        limit = due + self._patience
        return self._now >= limit or self.look_again(limit)

    def look_again(self, at: float) -> bool:
        """Have the scheduler asked again at that time; it is not yet, so false."""
        self.again = min(self.again, at)
        return False

    def _has_next(self, step: StepState, waiting: list[int]) -> bool:
        """Whether one of the step's ``waiting`` tasks may become ready too early."""
        if step.outcome is not Outcome.OK:
            return False
        return any(not self._takes_long(step, task) for task in waiting)

    def _takes_long(self, step: StepState, task: int) -> bool:
        """Whether some chain of unfinished tasks before ``task`` takes as long as the background task.

        Walks the graph backwards from ``task``, deepest first, which soon finds a long chain where there is one, and
        walks on from a task again only if it has found a longer way to it.
        """
        wanted = self._patience * _SLACK
        furthest = {task: 0.0}
        stack = [task]
        while stack:
            self._left -= 1
            if self._left < 0:
                return False
            current = stack.pop()
            if self._waits_for_caller(step, current):
                return True
            for before in step.graph.dependencies[current]:
                state = step.states[before]
                if state is TaskState.COMPLETED:
                    continue
                seconds = furthest[current] + self._seconds(step, before, state)
                if seconds >= wanted:
                    return True
                if state is TaskState.WAITING and seconds > furthest.get(before, -1.0):
                    furthest[before] = seconds
                    stack.append(before)
        return False

    @staticmethod
    def _waits_for_caller(step: StepState, task: int) -> bool:
        if not step.closed_gates:
            return False
        microbatch = step.graph.tasks[task].microbatch
        return microbatch in step.closed_gates and step.graph.gates[microbatch] == task

    def _seconds(self, step: StepState, task: int, state: TaskState) -> float:
        """How long ``task`` keeps others waiting at least, from the moment at which it is ready or from now."""
        if state in (TaskState.DISPATCHED, TaskState.ISSUED):
            return self._busy(step.claims[task].lane, (step.number, task))
        seconds = step.job.expected(step.graph.tasks[task])
        if seconds is None:
            return inf
        if state is TaskState.READY:
            lane = step.claims[task].lane
            # A rule may have refused it, until something leaves the device; nobody knows when.
            return inf if step.admission is not None and not lane.in_flight else seconds + self._busy(lane)
        return seconds

    def _busy(self, lane: LaneState, last: tuple[int, int] | None = None) -> float:
        """The seconds until the lane is done with all that it holds, or with ``last``."""
        total = 0.0
        for position, (key, (seconds, _)) in enumerate(lane.holding.items()):
            if seconds is None:
                return inf
            total += seconds
            if not position:
                end = lane.since + seconds
                if self._is_late(end):
                    return inf
                total = max(0.0, end - self._now)
            if key == last:
                break
        return total
