"""Handing ready tasks over to the lanes' devices.

Where nothing is to be chosen, a ready task goes at once, and what depends on it on the same device follows. Where a
rule chooses, or several jobs meet, the lane is noted, and its turn comes with ``settle``: then everything that has
happened is known. Foreground lanes come first there, since what they are handed decides how long a lane would idle::

    make_ready ─▶ heap of the claim ─┬─ one job, no rule ──▶ dispatched at once
                                     └─ noted ─▶ settle ─┬─ one job ─────▶ its rule chooses
                                                         ├─ foreground ──▶ lowest virtual time (lanes.py)
                                                         └─ background ──▶ if there is time (outlook.py)
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from math import inf

from asyncpipe.core.engine.events import Command, Dispatch
from asyncpipe.core.engine.lanes import Claim, LaneState
from asyncpipe.core.engine.outlook import Outlook
from asyncpipe.core.engine.state import StepState, TaskState
from asyncpipe.core.graph.task import Queue
from asyncpipe.errors import ScheduleError

__all__ = ["Dispatcher"]

# Module constants: an enum attribute costs a lookup in the hottest loop.
_READY, _DISPATCHED = TaskState.READY, TaskState.DISPATCHED


class Dispatcher:
    """Decides which ready task is handed over next. Mutated by the scheduler alone."""

    def __init__(self, cap: int) -> None:
        """``cap`` bounds the tasks that a lane holds."""
        self._cap = cap
        self._unsettled: dict[int, LaneState] = {}
        """Lanes where there is something to choose: a rule's, or between jobs."""
        self._fillable: dict[int, LaneState] = {}
        """Lanes where a background job has something ready."""
        self._broken: list[tuple[StepState, int, ScheduleError]] = []
        self.again = inf
        """When ``settle`` could choose otherwise although nothing has happened."""
        self.settled = 0.0
        """When it last chose."""

    def make_ready(self, step: StepState, task: int, now: float) -> Claim:
        """Queue a task whose dependencies are met; returns where."""
        step.states[task] = _READY
        claim = step.claims[task]
        if claim.left_at is not None:
            claim.come_back(now)
        rule = step.graph.rule
        heappush(claim.ready, (step.number, task if rule is None else rule.ranks[task], step))
        return claim

    def dispatch_ready(self, touched: Iterable[Claim], commands: list[Command], now: float) -> None:
        """Dispatch what ``touched`` claims have ready and their lanes room for; note lanes with a choice."""
        pending = list(touched)
        while pending:
            claim = pending.pop()
            if claim.lane.shared:
                self._unsettled[id(claim.lane)] = claim.lane
            elif claim.ready:
                pending += self._dispatch_claim(claim, commands, now)

    def _dispatch_claim(self, claim: Claim, commands: list[Command], now: float) -> list[Claim]:
        """Dispatch for the only job on a lane; returns other claims that have more to do by that."""
        lane = claim.lane
        others: list[Claim] = []
        while claim.ready and claim.in_flight < self._cap:
            _, rank, owner = claim.ready[0]
            if owner.admission is not None and lane.lane.queue is Queue.COMPUTE:
                self._unsettled[id(lane)] = lane
                break
            heappop(claim.ready)
            task = rank if owner.graph.rule is None else owner.graph.rule.by_rank[rank]
            others += self._dispatch(owner, task, claim, commands, now)
        return others

    def _dispatch(self, step: StepState, task: int, claim: Claim, commands: list[Command], now: float) -> list[Claim]:
        """Hand ``task`` over: its dependents on the same device queue up behind it. Returns other claims of theirs."""
        command = Dispatch(step.number, task)
        step.journal.append((now, command))
        commands.append(command)
        step.states[task] = _DISPATCHED
        step.held += 1
        claim.in_flight += 1
        if claim.timed:
            claim.begin(step.number, task, step.job.expected(step.graph.tasks[task]), now)
        others: list[Claim] = []
        if step.admission is not None:
            return others
        unmet = step.unmet
        for dependent in step.graph.local_dependents[task]:
            unmet[dependent] -= 1
            if not unmet[dependent]:
                other = self.make_ready(step, dependent, now)
                if other is not claim:
                    others.append(other)
        return others

    # Choices

    def note(self, lane: LaneState) -> None:
        """Have ``settle`` look at ``lane``, whatever is ready there."""
        self._unsettled[id(lane)] = lane

    def settle(self, commands: list[Command], now: float) -> bool:
        """Make every choice that is open; false if there is none."""
        if not self._unsettled and not self._fillable:
            return False
        self.settled = now
        while True:
            while self._unsettled:
                _, lane = self._unsettled.popitem()
                (self._share_out if lane.shared else self._choose)(lane, commands, now)
            self._fill(commands, now)
            if not self._unsettled:
                return True

    def take_broken(self) -> list[tuple[StepState, int, ScheduleError]]:
        """The tasks at which a rule has raised since this was last asked, and what to tell about it."""
        broken, self._broken = self._broken, []
        return broken

    def _choose(self, lane: LaneState, commands: list[Command], now: float) -> None:
        """Dispatch the tasks of ruled steps that come first among those that the lane has ready and may run."""
        for claim in lane.claims:
            while claim.ready and claim.in_flight < self._cap and claim.has_room:
                if claim.ready[0][2].graph.rule is None:
                    self.dispatch_ready([claim], commands, now)
                    return
                self._hand_over(claim, commands, now)

    def _share_out(self, lane: LaneState, commands: list[Command], now: float) -> None:
        """Dispatch what the foreground jobs of a lane have ready, each in its turn."""
        while (claim := lane.first(now, self._cap)) is not None and not lane.awaited(claim, now):
            self._hand_over(claim, commands, now)
        if claim is None:
            lane.empty_since = None
        if claim is not None or any(claim.ready and claim.job.share.background for claim in lane.claims):
            self._fillable[id(lane)] = lane

    def _fill(self, commands: list[Command], now: float) -> None:
        """Dispatch, on lanes that would idle, tasks of jobs that should let others go first, if those do not come."""
        outlook = Outlook(now)
        for key, lane in tuple(self._fillable.items()):
            if lane.in_flight:
                continue
            first = lane.first(now, self._cap)
            if first is not None:
                if _has_time(first, outlook, lane.awaited(first, now)) or _has_waited(first, outlook, now):
                    self._hand_over(first, commands, now)
                    self._unsettled[key] = lane
                continue
            claims = lane.background()
            if not claims:
                del self._fillable[key]
            foreground = [claim for claim in lane.claims if not claim.job.share.background]
            for claim in claims:
                while claim.ready and not lane.in_flight and _has_time(claim, outlook, foreground):
                    self._hand_over(claim, commands, now)
        self.again = outlook.again

    def _hand_over(self, claim: Claim, commands: list[Command], now: float) -> None:
        """Dispatch the first task that the claim has ready, unless a rule does not let it in yet."""
        _, rank, owner = heappop(claim.ready)
        rule = owner.graph.rule
        task = rank if rule is None else rule.by_rank[rank]
        if owner.admission is not None and owner.is_admitted(task):
            try:
                freed = owner.admission.enter(task)
            except Exception as error:  # noqa: BLE001 - anybody's code: it ends the step, not the scheduler
                self._broken.append((owner, task, owner.refused(task, f"but raises {error!r}", error)))
                return
            if freed is None:
                return
            for other in freed:
                self.make_ready(owner, other, now)
        self.dispatch_ready(self._dispatch(owner, task, claim, commands, now), commands, now)


def _has_time(claim: Claim, outlook: Outlook, others: Iterable[Claim]) -> bool:
    """Whether the next task of ``claim`` would be over before any of ``others`` need the lane."""
    seconds = _next_seconds(claim)
    return seconds is None or outlook.is_free(others, seconds)


def _has_waited(claim: Claim, outlook: Outlook, now: float) -> bool:
    """Whether the lane has stood empty for as long as the next task of a foreground job would have taken."""
    lane = claim.lane
    if lane.empty_since is None:
        lane.empty_since = now
    until = lane.empty_since + (_next_seconds(claim) or 0.0)
    return now >= until or outlook.look_again(until)


def _next_seconds(claim: Claim) -> float | None:
    """What the next task of a job is expected to take; ``None`` if nobody knows."""
    _, rank, step = claim.ready[0]
    graph = step.graph
    return step.job.expected(graph.tasks[rank if graph.rule is None else graph.rule.by_rank[rank]])
