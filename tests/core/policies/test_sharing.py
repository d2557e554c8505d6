"""Several jobs on the same lanes: their shares, and what is known of them; on virtual time and by hand."""

from __future__ import annotations

import pytest
from sharing_helpers import (
    ByHand,
    always,
    computed,
    dispatched,
    flows_of,
    graph_of,
    one_lane,
    spans,
)

from asyncpipe.core.engine.events import (
    Outcome,
    StepCancelled,
    StepCompleted,
    StepSubmitted,
    TaskCompleted,
    TaskDropped,
    TaskFailed,
)
from asyncpipe.core.policies.fair_share import MOST_AHEAD
from asyncpipe.core.policies.flow import Flow
from asyncpipe.core.policies.jobs import JobAccount
from asyncpipe.core.policies.share import Share
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.simulate import SimulatedJob, simulate, simulate_jobs
from asyncpipe.errors import OptionError

LIGHT, HEAVY = Share("light"), Share("heavy", weight=3.0)
BACKGROUND = Share("background", background=True)


# Shares


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_is_finite_and_positive(weight: float) -> None:
    with pytest.raises(OptionError, match="the weight of a job must be a finite number above 0, got"):
        Share("a", weight=weight)


@pytest.mark.parametrize(("weights", "seconds"), [((1, 3), (1.0, 1.0)), ((1, 1), (0.5, 2.0)), ((2, 5), (3.0, 0.7))])
def test_jobs_that_always_have_something_ready_differ_by_a_few_tasks(
    weights: tuple[float, float], seconds: tuple[float, float]
) -> None:
    """The bound of start-time fair queueing, with two tasks of each in flight at most."""
    jobs = [
        SimulatedJob(one_lane(400), always(cost), Share(name, weight))
        for name, weight, cost in zip("ab", weights, seconds, strict=True)
    ]
    runs = simulate_jobs(jobs, in_flight=MOST_AHEAD)
    ends = sorted((end, end - start, n) for n, run in enumerate(runs) for start, end in spans(run))
    both = min(spans(run)[-1][1] for run in runs)
    shares = [0.0, 0.0]
    bound = 2 * sum(cost / weight for cost, weight in zip(seconds, weights, strict=True))
    for end, took, job in ends:
        if end > both:
            break
        shares[job] += took / weights[job]
        assert abs(shares[0] - shares[1]) <= bound


ONE_TO_THREE = {
    "1f1b, 2 stages": ("1f1b", 2, 8, Costs(0.01, 0.02, copy=0.0005), Costs(0.01, 0.02, copy=0.0005), 0.01),
    "1f1b, 4 stages": ("1f1b", 4, 16, Costs(0.01, 0.02, copy=0.0005), Costs(0.01, 0.02, copy=0.0005), 0.02),
    "gpipe, 2 stages": ("gpipe", 2, 8, Costs(0.01, 0.02, copy=0.0005), Costs(0.01, 0.02, copy=0.0005), 0.02),
    "1f1b, coarse next to fine": ("1f1b", 2, 8, Costs(0.01, 0.02, copy=0.0005), Costs(0.005, 0.011, copy=0.0005), 0.0),
    "1f1b, fine next to coarse": ("1f1b", 2, 8, Costs(0.005, 0.01), Costs(0.013, 0.027), 0.02),
}


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "light", "heavy", "pause"), ONE_TO_THREE.values(), ids=ONE_TO_THREE
)
def test_weights_1_and_3_share_device_time_1_to_3(
    schedule: str, stages: int, microbatches: int, light: Costs, heavy: Costs, pause: float
) -> None:
    graph = graph_of(schedule, stages, microbatches)
    for cost in (light, heavy):
        (alone,) = simulate_jobs([SimulatedJob(graph, cost, steps=10, pause=pause)])
        took = alone.records[-1].journal[-1][0]
        assert min(computed(alone).values()) / took > 0.75, "it keeps its lanes busy"
    first = SimulatedJob(graph, light, LIGHT, steps=None, pause=pause)
    second = SimulatedJob(graph, heavy, HEAVY, steps=80, pause=pause)
    little, much = simulate_jobs([first, second])
    for device, seconds in computed(much).items():
        assert seconds / computed(little)[device] == pytest.approx(3.0, rel=0.05)


def test_who_was_away_for_long_catches_up_one_step_and_shares_from_then_on() -> None:
    """Its step of 4 tasks ran twice before the pause of 1000, so that 4 of the first of 40 may be caught up."""
    hand, now = ByHand(), 0.0
    queue = dispatched(hand.send(StepSubmitted(0, one_lane(1200), Share("busy")), now))
    steps = {4.0: (1, 4), 40.0: (2, 4), 1040.0: (3, 40)}
    done: list[int] = []
    while len(done) < 1150:
        now += 1.0
        if queue:
            step, task = queue.pop(0)
            queue += dispatched(hand.send(TaskCompleted(step, task, now - 1.0, now), now))
        else:
            step = -1
            queue += dispatched(hand.choose(now))
        done.append(step)
        if now in steps:
            number, tasks = steps[now]
            queue += dispatched(hand.send(StepSubmitted(number, one_lane(tasks), Share("away")), now))
    assert done.count(-1) <= 2, "the lane waited for it when it was due, and then no longer"
    back = done[1040 : done.index(3) + 82]
    for size in range(len(back)):
        had = sum(step == 3 for step in back[: size + 1])
        assert had <= (size + 1) / 2 + 4 + MOST_AHEAD
    assert 36 <= sum(step == 3 for step in back) <= 40


# What one job alone sees


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "backward-first"])
def test_a_named_job_alone_runs_as_a_pipeline_by_itself(schedule: str) -> None:
    graph = graph_of(schedule, 3, 5)
    (run,) = simulate_jobs([SimulatedJob(graph, Costs(copy=0.25), Share("a", weight=7.0))])
    plain = simulate(graph, Costs(copy=0.25))
    assert run.records[0].journal[1:] == plain.journal[1:]


def test_a_job_that_is_back_soon_counts_as_there() -> None:
    """Its next step would else find the lane full of the other's tasks."""
    hand, short, long = ByHand(), one_lane(1), one_lane(200)
    for step in range(3):
        hand.run_step(step, short, Share("a"), 2.0 * step, 1.0)
    # It leaves at 5, usually for 1 second.
    assert len(dispatched(hand.send(StepSubmitted(3, long, Share("b")), 5.5))) == MOST_AHEAD
    assert len(dispatched(hand.send(TaskCompleted(3, 0, 5.5, 6.4), 6.4))) == 1
    assert len(dispatched(hand.send(TaskCompleted(3, 1, 6.4, 7.5), 7.5))) == 15, "it does not come"


def test_what_is_in_flight_counts_by_weight_as_what_is_charged() -> None:
    flow = Flow(JobAccount("a", True, Share("a", weight=4.0)), False, 1.0)
    flow.virtual, flow.expected = 1.0, 2.0
    assert flow.tag == 1.5


# Failures, and what is remembered


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_one_jobs_step_leaves_the_others_alone(fails: bool) -> None:
    hand, graph = ByHand(), one_lane(4)
    hand.send(StepSubmitted(0, graph, Share("a")), 0.0)
    hand.send(StepSubmitted(1, graph, Share("b")), 0.0)
    hand.send(StepSubmitted(2, graph, BACKGROUND), 0.0)
    if fails:
        hand.send(TaskFailed(0, 0, RuntimeError("no")), 1.0)
    else:
        hand.send(StepCancelled(0), 0.5)
        hand.send(TaskCompleted(0, 0, 0.0, 1.0), 1.0)
    for task in range(1, 4):
        commands = hand.send(TaskDropped(0, task), 1.0)
    assert commands[1] == StepCompleted(0, *((Outcome.FAILED, 0, commands[1].error) if fails else (Outcome.CANCELLED,)))  # type: ignore[union-attr]
    assert dispatched(commands) == [(1, 1), (1, 2), (1, 3)], "it is alone, as far as is known"
    for task in range(4):
        commands = hand.send(TaskCompleted(1, task, task + 1.0, task + 2.0), task + 2.0)
    assert dispatched(commands) == [(2, 0)]
    flows = {flow.job.name: flow for flow in flows_of(hand.state)}
    assert (flows["a"].in_flight, flows["a"].expected, flows["a"].steps) == (0, 0.0, [])
    assert flows["b"].virtual == 4.0


def test_a_job_is_forgotten_when_it_is_gone() -> None:
    hand, graph = ByHand(), one_lane(1)
    hand.run_step(0, graph, Share("keeps"), 0.0, 1.0)
    for step in range(1, 200):
        share = Share(f"job {step}", background=bool(step % 2))
        hand.send(StepSubmitted(step, graph, share), step)
        hand.state.forget(share.job)
        assert hand.state.expected(step, 0) is None
        hand.choose(step + 5.0)
        hand.send(TaskCompleted(step, 0, step, step + 1.0), step + 5.0)
        hand.state.remove(step)
    assert {flow.job.name for flow in flows_of(hand.state)} == {"keeps"}
    assert hand.state._jobs._jobs.keys() == {"keeps"}
    hand.state.forget("keeps")
    hand.state.forget("never heard of")
    assert not flows_of(hand.state)
    assert not hand.state._jobs._jobs
