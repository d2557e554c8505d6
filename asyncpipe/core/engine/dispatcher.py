"""Hands ready tasks over to the devices, in the order that each lane's policy chooses.

A lane with ``FirstComeFirstServed`` leaves nothing to decide: its ready task goes at once. Any other policy is asked
later, in ``choose``, when everything that has happened is known; lanes that would idle then are offered background
tasks, last, since what foreground lanes are handed says how long a lane would idle::

    make_ready ─▶ policy.ready ─┬─ first come, first served ─▶ handed over at once
                                └─ any other ─▶ choose ─▶ policy.choose ─▶ admission ─▶ handed over
                                                              │
                                                              └─▶ policy.backfill, on lanes that would idle
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from asyncpipe.core.engine.events import Command, Dispatch
from asyncpipe.core.engine.steps import Following, LaneState, StepState
from asyncpipe.core.policies.fair_share import FairShare
from asyncpipe.core.policies.policy import Chosen, TaskState
from asyncpipe.errors import PolicyError, ScheduleError

__all__ = ["Dispatcher"]

# Module constants: an enum attribute costs a lookup in the hottest loop.
_READY, _DISPATCHED = TaskState.READY, TaskState.DISPATCHED


class Dispatcher:
    """Hands tasks over. Mutated by the scheduler alone."""

    def __init__(self, cap: int, *, validate: bool) -> None:
        """``cap`` bounds the tasks that a lane holds; ``validate`` what policies choose, as they are anybody's code."""
        self._cap = cap
        self._validate = validate
        self._undecided: dict[LaneState, None] = {}
        """Lanes where something has happened since their policy was asked."""
        self._held_back: dict[LaneState, None] = {}
        """Lanes where something is ready and was not chosen."""
        self._alarms: dict[LaneState, float] = {}
        """When policies want to be asked although nothing has happened."""
        self._broken: list[tuple[StepState, int, ScheduleError]] = []
        self.chosen_at = 0.0
        """When policies were asked last."""

    def make_ready(self, step: StepState, task: int, now: float) -> LaneState:
        """Tell the lane's policy of a task whose dependencies are met; returns the lane."""
        step.states[task] = _READY
        lane = step.lanes[task]
        if step.by_program:
            step.handed_over.append(task)
        elif lane.in_order:
            rule = step.graph.rule
            heappush(lane.heap, (step.number, task if rule is None else rule.ranks[task], task, step))
        else:
            lane.policy.ready(step, task, now)
        return lane

    def note_handed_over(self, step: StepState, now: float) -> None:
        """Note the dispatch of the tasks that devices have by their programs, and whose dependencies are met."""
        states, unmet, dependents = step.states, step.unmet, step.graph.local_dependents
        for task in (pending := step.handed_over):  # Which grows meanwhile.
            step.journal.append((now, Dispatch(step.number, task)))
            states[task] = _DISPATCHED
            for dependent in dependents[task]:
                unmet[dependent] -= 1
                if not unmet[dependent]:
                    pending.append(dependent)
            if step.following is not None:
                self._follow(step.following, step.lanes[task], now)
        step.held += len(pending)
        pending.clear()
        if step.following is not None and step.following.step.handed_over:
            self.note_handed_over(step.following.step, now)

    def dispatch_ready(self, touched: Iterable[LaneState], commands: list[Command], now: float) -> None:
        """Hand over what ``touched`` lanes have ready, where nothing is to be decided; note the other lanes."""
        pending = list(touched)
        while pending:
            lane = pending.pop()
            if lane.in_order:
                while lane.heap and lane.in_flight < self._cap:
                    _, _, task, step = heappop(lane.heap)
                    pending += self._dispatch(step, task, lane, commands, now)  # type: ignore[arg-type]
                continue
            policy = lane.policy
            while policy.at_once:
                if lane.in_flight >= self._cap or (chosen := policy.choose(now)) is None:
                    break
                pending += self._admit(chosen, lane, commands, now)
            else:
                self._undecided[lane] = None

    def _dispatch(
        self, step: StepState, task: int, lane: LaneState, commands: list[Command], now: float
    ) -> list[LaneState]:
        """Hand ``task`` over; its dependents on the same device queue up behind it. Returns their lanes, if others."""
        command = Dispatch(step.number, task)
        step.journal.append((now, command))
        commands.append(command)
        step.states[task] = _DISPATCHED
        step.held += 1
        lane.in_flight += 1
        if not lane.in_order:
            lane.policy.started(step, task, now)
            if lane.others is not None:
                lane.others.handed_over(now, is_first=lane.in_flight == 1)
        others: list[LaneState] = []
        if step.admission is not None:
            return others
        unmet = step.unmet
        for dependent in step.graph.local_dependents[task]:
            unmet[dependent] -= 1
            if not unmet[dependent]:
                other = self.make_ready(step, dependent, now)
                if other is not lane:
                    others.append(other)
        if step.following is not None:
            self._follow(step.following, lane, now)
        return others

    def _follow(self, following: Following, lane: LaneState, now: float) -> None:
        """A task was handed over on ``lane``, which has perhaps all compute before the step behind now."""
        if (released := following.dispatched(lane)) is not None:
            self.make_ready(following.step, released, now)

    # Choices

    def choose(self, commands: list[Command], now: float) -> bool:
        """Ask policies until none of them has another task to hand over; false if none was to be asked."""
        if not (self._undecided or self._held_back or self._alarms):
            return False
        self.chosen_at = now
        self._undecided.update({lane: None for lane, at in self._alarms.items() if at <= now})
        while True:
            while self._undecided:
                self._ask(self._undecided.popitem()[0], commands, now)
            for lane in tuple(self._held_back):
                self._backfill(lane, commands, now)
            if not self._undecided:
                return True

    def wake_at(self, now: float) -> float | None:
        """When ``choose`` could hand a task over although nothing has happened; ``None`` if never."""
        return max(now, min(self._alarms.values())) if self._alarms else None

    def pop_broken(self) -> list[tuple[StepState, int, ScheduleError]]:
        """The tasks at which a rule has raised, or refused an empty device a micro-batch, and what to tell about it."""
        broken, self._broken = self._broken, []
        return broken

    def _ask(self, lane: LaneState, commands: list[Command], now: float) -> None:
        policy = lane.policy
        while (lane.is_shared or lane.in_flight < self._cap) and (chosen := policy.choose(now)) is not None:
            self.dispatch_ready(self._admit(chosen, lane, commands, now), commands, now)
        if isinstance(policy, FairShare) and policy.holds_back:
            self._held_back[lane] = None
        self._note_alarm(lane, now)

    def _backfill(self, lane: LaneState, commands: list[Command], now: float) -> None:
        policy = lane.policy
        assert isinstance(policy, FairShare)
        while (chosen := policy.backfill(now)) is not None:
            self.dispatch_ready(self._admit(chosen, lane, commands, now), commands, now)
            if not chosen[0].job.share.background:
                self._undecided[lane] = None
                break
        if not policy.holds_back:
            del self._held_back[lane]
        elif lane.others is not None and not lane.in_flight:
            lane.others.keep(policy.waiting, now)
        self._note_alarm(lane, now)

    def _note_alarm(self, lane: LaneState, now: float) -> None:
        at = lane.policy.wake_at(now)
        if at is not None:
            self._alarms[lane] = at
        else:
            self._alarms.pop(lane, None)

    def _admit(self, chosen: Chosen, lane: LaneState, commands: list[Command], now: float) -> list[LaneState]:
        """Hand over what a policy has chosen, unless a rule does not let it in yet; returns as ``_dispatch``."""
        step, task = chosen
        if self._validate and not (isinstance(step, StepState) and step.is_ready(task, lane)):
            raise PolicyError(
                f"{type(lane.policy).__name__} on {lane.lane} chose {chosen!r}, which is not ready there; choose must "
                "answer a (step, task) that ready was called with, once, or None"
            )
        assert isinstance(step, StepState)
        if step.admission is not None and step.is_admitted(task):
            try:
                freed = step.admission.enter(task)
            except Exception as error:  # noqa: BLE001 - a rule is anybody's code: it ends the step, not the scheduler
                self._broken.append((step, task, step.refused(task, f"but raises {error!r}", error)))
                return []
            if freed is None:
                if step.admission.is_stuck(task):
                    self._broken.append((step, task, step.refused(task, "although the device holds no micro-batch")))
                return []
            for other in freed:
                self.make_ready(step, other, now)
        return self._dispatch(step, task, lane, commands, now)
