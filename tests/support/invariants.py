"""What must hold of a scheduler between two events."""

from __future__ import annotations

from collections.abc import Sequence

from asyncpipe.core.engine.scheduler import SchedulerState
from asyncpipe.core.engine.steps import LaneState
from asyncpipe.core.policies.fair_share import MOST_AHEAD, FairShare
from asyncpipe.core.policies.first_come import FirstComeFirstServed
from asyncpipe.core.policies.flow import Flow
from asyncpipe.core.policies.policy import Policy, TaskState

__all__ = ["check_scheduler", "flows_on"]


def check_scheduler(state: SchedulerState) -> None:
    """Assert it, once ``choose`` was called."""
    cap = state._cap
    held: dict[LaneState, int] = {}
    for step in state._steps.values():
        counts = [step.states.count(each) for each in TaskState]
        assert not step.handed_over, "a dispatch was not noted"
        assert step.held == counts[TaskState.DISPATCHED] + counts[TaskState.ISSUED], "held tasks are miscounted"
        for task, (at, lane) in enumerate(zip(step.states, step.lanes, strict=True)):
            if at in (TaskState.DISPATCHED, TaskState.ISSUED) and not step.by_program:
                held[lane] = held.get(lane, 0) + 1
            if at is TaskState.WAITING and step.running:
                assert step.unmet[task] > 0, f"{step.graph.tasks[task]} waits for nothing"
    for lane in state._lanes.values():
        name, policy = lane.lane, lane.policy
        assert lane.in_flight == held.get(lane, 0), f"{name} is miscounted"
        assert lane.in_flight <= cap or lane.is_shared, f"{name} holds too many tasks"
        if lane.in_order and lane.in_flight < cap:
            assert not lane.heap, f"{name} has work and room, but stands still"
        if isinstance(policy, FirstComeFirstServed) and policy.ruled_lane is not None and policy.heap:
            assert policy.ruled_lane.in_flight, f"{name} has work and room, but stands still"
        if isinstance(policy, FairShare):
            _check_shares(policy, lane, cap, state._dispatcher.chosen_at)


def flows_on(policy: Policy) -> Sequence[Flow]:
    """What each job has on a lane, if several share it."""
    return list(policy._flows.values()) if isinstance(policy, FairShare) else []


def _check_shares(policy: FairShare, lane: LaneState, cap: int, now: float) -> None:
    name, flows = lane.lane, flows_on(policy)
    assert len(policy._holding) <= lane.in_flight, f"{name} remembers what it does not hold"
    assert sum(flow.in_flight for flow in flows) == lane.in_flight, "in flight is miscounted"
    background = [flow for flow in flows if flow.background and not flow.is_late]
    assert sum(flow.in_flight for flow in background) <= MOST_AHEAD, f"{name} holds many background tasks"
    # A shared lane may hold less than it has room for until its next event: who is active changes with time.
    room = 1 if len(flows) > 1 or any(flow.background for flow in flows) else cap
    for flow in flows:
        assert flow.expected >= 0.0, "less than nothing is expected"
        assert flow.in_flight or not flow.expected, "nothing is in flight, and is expected to take time"
        assert all(step.left > 0 for step in flow.steps), "a step that is over is waited for"
        assert not (flow.steps and flow.due is not None), "a job is under way and due"
        assert flow.in_flight <= cap, f"{name} holds too many tasks of {flow.job.name!r}"
        if flow.ready.heap and not flow.background and policy._has_room(flow, room) and lane.in_flight < room:
            assert policy._awaited(flow, now), f"{name} has work and room, but stands still"
