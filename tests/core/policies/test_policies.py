"""Policies: each of the built-in ones alone, what a policy is told, and any policy of a user's own."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharing_helpers import ByHand, always, dispatched, graph_of, one_lane

from asyncpipe.core.engine.events import StepCancelled, StepCompleted, StepSubmitted, TaskCompleted, TaskDropped
from asyncpipe.core.engine.scheduler import SchedulerState
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import Queue
from asyncpipe.core.graph.task_graph import Phase
from asyncpipe.core.policies.first_come import FirstComeFirstServed
from asyncpipe.core.policies.policy import LaneView, Policy, StepView
from asyncpipe.core.policies.share import Share
from asyncpipe.core.predict.simulate import SimulatedJob, simulate_jobs
from asyncpipe.core.schedules.protocol import Action, RuledSchedule, Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import PolicyError

# Which policy a lane gets


@pytest.mark.parametrize("share", [Share("other"), Share(background=True)])
@pytest.mark.parametrize("first", ["1f1b", "backward-first"])
def test_a_policy_takes_over_what_is_ready_and_in_flight(first: str, share: Share) -> None:
    hand, graph = ByHand(in_flight=1), graph_of(first, 1, 3)
    assert dispatched(hand.send(StepSubmitted(0, graph), 0.0)) == [(0, 0)]
    hand.send(StepSubmitted(1, graph, share), 0.0)
    done, queue = set(), [(0, 0)]
    for now in range(1, 100):
        if not queue and (wake_at := hand.state.wake_at(now)) is not None:
            queue += dispatched(hand.choose(wake_at))
        if not queue:
            break
        step, task = queue.pop(0)
        done.add((step, task))
        queue += dispatched(hand.send(TaskCompleted(step, task, now - 1.0, now), now))
    assert done == {(step, task.number) for step in (0, 1) for task in graph.tasks}


def test_an_evaluation_on_a_ruled_lane_is_bounded_as_well() -> None:
    hand, ruled, evaluation = ByHand(in_flight=1), graph_of("backward-first", 1, 1), one_lane(3)
    queue = dispatched(hand.send(StepSubmitted(0, ruled), 0.0))
    for now in range(1, 4):
        step, task = queue.pop(0) if queue else (0, -1)
        if task >= 0:
            queue += dispatched(hand.send(TaskCompleted(step, task, now - 1.0, now), now))
    assert dispatched(hand.send(StepSubmitted(1, evaluation), 9.0)) == [(1, 0)]


# What a policy is told


class Noting(FirstComeFirstServed):
    """Runs what came first, and keeps what it was told."""

    def __init__(self, lane: LaneView) -> None:
        super().__init__()
        self.told: list[tuple[str, int, int]] = []

    def begin(self, step: StepView, now: float) -> None:
        self.told.append(("begin", step.number, -1))

    def ready(self, step: StepView, task: int, now: float) -> None:
        self.told.append(("ready", step.number, task))
        super().ready(step, task, now)

    def choose(self, now: float) -> tuple[StepView, int] | None:
        chosen = super().choose(now)
        if chosen is not None:
            self.told.append(("chosen", chosen[0].number, chosen[1]))
        return chosen

    def started(self, step: StepView, task: int, now: float) -> None:
        self.told.append(("started", step.number, task))

    def completed(self, step: StepView, task: int, seconds: float | None, now: float) -> None:
        self.told.append(("dropped" if seconds is None else "completed", step.number, task))

    def drop(self, step: StepView) -> None:
        self.told.append(("drop", step.number, -1))
        super().drop(step)

    def end(self, step: StepView, now: float) -> None:
        self.told.append(("end", step.number, -1))


def noting(in_flight: int = 16) -> tuple[ByHand, list[tuple[str, int, int]]]:
    hand, told = ByHand(), []

    def make(lane: LaneView) -> Policy:
        policy = Noting(lane)
        if lane.lane.queue is Queue.COMPUTE:
            policy.told = told
        return policy

    hand.state = SchedulerState(in_flight=in_flight, policy=make)
    return hand, told


def test_a_policy_is_told_a_steps_life_in_order() -> None:
    hand, told = noting(in_flight=1)
    hand.send(StepSubmitted(0, one_lane(2)), 0.0)
    hand.send(TaskCompleted(0, 0, 0.0, 1.0), 1.0)
    hand.send(TaskCompleted(0, 1, 1.0, 2.0), 2.0)
    words = [(word, task) for word, _, task in told]
    assert words.pop(0) == ("begin", -1)
    assert words.pop() == ("end", -1)
    for task in (0, 1):
        assert [word for word, of in words if of == task] == ["ready", "chosen", "started", "completed"]
    assert words.index(("started", 1)) > words.index(("completed", 0)), "one at a time"


def test_a_policy_is_told_that_a_step_is_aborted() -> None:
    hand, told = noting(in_flight=1)
    hand.send(StepSubmitted(0, one_lane(2)), 0.0)
    hand.send(StepCancelled(0), 1.0)
    commands = hand.send(TaskDropped(0, 0), 2.0)
    assert isinstance(commands[-1], StepCompleted)
    words = [word for word, *_ in told if word not in ("ready", "begin")]
    assert words == ["chosen", "started", "drop", "dropped", "end"]


def test_a_task_that_a_rule_refuses_is_ready_again_when_it_may_come() -> None:
    class OneAtATime(RuledSchedule):
        def priority(self, action: Action, shape: Shape) -> int:
            return action.microbatch

        def admit(self, action: Action, live: int, shape: Shape) -> bool:
            return not live

    hand, told = noting()
    graph = lower(OneAtATime(), Shape(1, 2, 1))
    queue = dispatched(hand.send(StepSubmitted(0, graph), 0.0))
    for now in range(1, 99):
        if not queue:
            break
        _, task = queue.pop(0)
        queue += dispatched(hand.send(TaskCompleted(0, task, now - 1.0, now), now))
    refused = [task for task in range(len(graph.tasks)) if told.count(("chosen", 0, task)) == 2]
    assert len(refused) == 1, "the second forward is chosen, refused and chosen again"
    assert told.count(("ready", 0, refused[0])) == 2
    assert told.count(("started", 0, refused[0])) == 1


# Any policy


class Whimsical(Policy):
    """Answers any ready task, or none for a while."""

    def __init__(self, lane: LaneView, draw: random.Random) -> None:
        self._draw = draw
        self._ready: list[tuple[StepView, int]] = []
        self._moody = False

    def ready(self, step: StepView, task: int, now: float) -> None:
        self._ready.append((step, task))

    def choose(self, now: float) -> tuple[StepView, int] | None:
        self._moody = not self._moody and self._draw.random() < 0.3
        if not self._ready or self._moody:
            return None
        return self._ready.pop(self._draw.randrange(len(self._ready)))

    def drop(self, step: StepView) -> None:
        self._ready = [entry for entry in self._ready if entry[0] is not step]

    def wake_at(self, now: float) -> float | None:
        return now + 0.5 if self._ready else None


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_any_policy_gets_every_job_through(draw: random.Random) -> None:
    """Orders and rules, with the dependencies, the cap and the rule's admit kept by the scheduler."""
    names = draw.sample(["gpipe", "1f1b", "zb-h1", "backward-first"], 2)
    jobs = [
        SimulatedJob(graph_of(name, 2, draw.randint(1, 4)), always(draw.choice([0.0, 1.0])), Share(name), steps=2)
        for name in names
    ]
    cap = draw.choice([1, 2, 16])
    runs = simulate_jobs(jobs, in_flight=cap, policy=lambda lane: Whimsical(lane, draw))
    for job, run in zip(jobs, runs, strict=True):
        assert len(run.records) == 2
        for record in run.records:
            done = sorted(event.task for _, event in record.journal if isinstance(event, TaskCompleted))
            assert done == list(range(len(job.graph.tasks)))


@pytest.mark.parametrize("wrong", ["twice", "a task that waits", "no task", "no step"])
def test_a_wrong_choice_is_told(wrong: str) -> None:
    class Wrong(Whimsical):
        def choose(self, now: float) -> tuple[StepView, int] | None:
            step, task = self._ready[0]
            answers = {
                "twice": (step, task),
                "a task that waits": (step, 2),
                "no task": (step, 99),
                "no step": ("step", 0),
            }
            return answers[wrong]  # type: ignore[return-value]

    state = SchedulerState(policy=lambda lane: Wrong(lane, random.Random(0)))
    graph = lower(find_schedule("gpipe"), Shape(1, 2, 1), phase=Phase.STEP)
    state.handle(StepSubmitted(0, graph), 0.0)
    with pytest.raises(PolicyError, match=r"^Wrong on dev:0/compute chose .*, which is not ready there; choose must"):
        state.choose(0.0)
