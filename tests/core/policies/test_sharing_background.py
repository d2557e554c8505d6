"""Background jobs: what they get of the time that others leave idle, and that they are in nobody's way."""

from __future__ import annotations

from itertools import pairwise

import pytest
from sharing_helpers import ByHand, always, computed, dispatched, graph_of, one_lane, shaken, spans, step_seconds

from asyncpipe.core.engine.events import GateOpened, StepSubmitted, TaskCompleted
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import Phase, TaskGraph
from asyncpipe.core.policies import fair_share
from asyncpipe.core.policies.share import Share
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.simulate import SimulatedJob, simulate_jobs
from asyncpipe.core.schedules.protocol import HintedSchedule, OrderedSchedule, Shape
from asyncpipe.core.schedules.registry import find_schedule

BACKGROUND = Share("background", background=True)


# Background jobs


def filler(microbatches: int = 48) -> TaskGraph:
    """Whatever is ready runs: a job with many micro-batches has something for every lane."""
    hint = find_schedule("gpipe")
    assert isinstance(hint, OrderedSchedule)
    return graph_of(HintedSchedule(hint), 4, microbatches)


FOREGROUND_COSTS = Costs(forward=0.01, backward=0.02, copy=0.0003)
FILLER_COSTS = Costs(forward=0.005, backward=0.01, copy=0.0003)


@pytest.mark.parametrize(
    ("pause", "sigma", "gets", "grows"), [(0.0, 0.0, 0.85, 0.01), (0.01, 0.0, 0.85, 0.01), (0.003, 0.05, 0.75, 0.01)]
)
def test_a_background_job_fills_the_bubbles(pause: float, sigma: float, gets: float, grows: float) -> None:
    graph = graph_of("1f1b", 4, 4)
    alone = SimulatedJob(graph, shaken(FOREGROUND_COSTS, sigma, 1), Share("foreground"), steps=60, pause=pause)
    expected = step_seconds(simulate_jobs([alone])[0].records)
    other = SimulatedJob(filler(), shaken(FILLER_COSTS, sigma, 2), BACKGROUND, steps=None)
    mine = SimulatedJob(graph, shaken(FOREGROUND_COSTS, sigma, 1), Share("foreground"), steps=60, pause=pause)
    foreground, background = simulate_jobs([mine, other])
    took = foreground.records[-1].journal[-1][0]
    idle = sum(took - seconds for seconds in computed(foreground).values())
    assert sum(computed(background).values()) / idle >= gets
    # The first step counts: nothing is known yet, so the background may be in its way.
    assert sum(step_seconds(foreground.records)) / sum(expected) - 1 <= grows + 0.05 / 60
    assert sum(step_seconds(foreground.records)[2:]) / sum(expected[2:]) - 1 <= grows


@pytest.mark.parametrize(("seconds", "fit"), [(1.5, 6), (2.0, 4), (3.0, 3), (4.0, 2), (9.0, 1), (9.5, 0)])
def test_as_many_background_tasks_as_fit_whole_into_the_gap(seconds: float, fit: int) -> None:
    """Device 1 idles for C, B(0,0), the next F(0,0) and C, which is 9; its F is handed over when C begins, after 8.5.

    While no step is under way its habits count, until 8.5; then the chain of F(0,0) and C does, until 9.
    """
    graph = graph_of("gpipe", 2, 1)
    first = SimulatedJob(graph, Costs(forward=3, backward=5, copy=0.5), Share("foreground"), steps=12)
    second = SimulatedJob(one_lane(1, "dev:1"), always(seconds), BACKGROUND, steps=None)
    foreground, background = simulate_jobs([first, second])
    starts = [record.journal[0][0] for record in foreground.records]
    begun = [sum(a <= start < b for start, _ in spans(background, "dev:1")) for a, b in pairwise(starts[4:])]
    assert begun == [fit] * len(begun)
    assert step_seconds(foreground.records)[4:] == pytest.approx([17.0] * 8)


@pytest.mark.parametrize(("seconds", "allowed"), [(1.0, True), (2.7, True), (2.8, False), (10.0, False)])
def test_a_running_task_counts_with_what_is_left_of_it_and_so_do_copies(seconds: float, allowed: bool) -> None:
    """Device 1 waits for F(0,0), which takes 3 and began 1 ago, and for C of 0.5; a tenth may be over late."""
    hand, graph, small = ByHand(), graph_of("gpipe", 2, 1, Phase.FORWARD), one_lane(1, "dev:1")
    hand.run_step(0, small, BACKGROUND, 0.0, seconds)
    now = 20.0
    hand.send(StepSubmitted(1, graph, Share("foreground")), now)
    for task, took in enumerate((3.0, 0.5, 1.0)):
        hand.send(TaskCompleted(1, task, now, now + took), now + took)
        now += took
    hand.send(StepSubmitted(2, graph, Share("foreground")), 30.0)
    assert bool(dispatched(hand.send(StepSubmitted(3, small, BACKGROUND), 31.0))) == allowed
    if not allowed:
        assert hand.state.wake_at(31.0) == pytest.approx(33.0 + seconds), "F(0,0) may hang"
        assert dispatched(hand.choose(33.0 + seconds)) == [(3, 0)]


def test_the_background_waits_for_a_step_that_is_due_and_as_long_again() -> None:
    hand, graph = ByHand(), one_lane(1)
    hand.run_step(0, graph, BACKGROUND, 0.0, 1.0)
    for step, start in ((1, 10.0), (2, 12.0), (3, 14.0)):
        hand.run_step(step, graph, Share("foreground"), start, 1.0)
    # It left at 15 and is due at 16.
    assert dispatched(hand.send(StepSubmitted(4, graph, BACKGROUND), 15.2)) == []
    assert hand.state.wake_at(15.2) == 17.0
    assert dispatched(hand.choose(16.9)) == []
    assert dispatched(hand.choose(17.0)) == [(4, 0)]
    assert hand.state.wake_at(17.0) is None


def test_a_backward_that_waits_for_its_caller_holds_nobody_back() -> None:
    hand, graph, small = ByHand(), graph_of("gpipe", 1, 2, Phase.BACKWARD), one_lane(1)
    hand.run_step(0, small, BACKGROUND, 0.0, 1.0)
    now = 1.0
    for step in range(1, 3):
        hand.send(StepSubmitted(step, graph, Share("foreground")), now)
        if step == 2:
            assert dispatched(hand.send(StepSubmitted(3, small, BACKGROUND), now)) == [(3, 0)]
            break
        for microbatch in (1, 0):
            (command,) = dispatched(hand.send(GateOpened(step, microbatch), now))
            now += 1.0
            hand.send(TaskCompleted(*command, now - 1.0, now), now)


def test_a_ready_foreground_task_goes_first_and_background_jobs_take_turns() -> None:
    """A task whose time is not known goes alone; otherwise one more is handed over behind the one that runs."""
    hand, graph = ByHand(), one_lane(4)
    assert dispatched(hand.send(StepSubmitted(0, graph, BACKGROUND), 0.0)) == [(0, 0)]
    assert dispatched(hand.send(StepSubmitted(1, one_lane(1), Share("foreground")), 0.0)) == [(1, 0)]
    assert dispatched(hand.send(TaskCompleted(0, 0, 0.0, 1.0), 1.0)) == []
    assert dispatched(hand.send(TaskCompleted(1, 0, 1.0, 2.0), 2.0)) == [(0, 1), (0, 2)]
    assert dispatched(hand.send(StepSubmitted(2, graph, Share("other", background=True)), 2.0)) == []
    assert dispatched(hand.send(TaskCompleted(0, 1, 2.0, 3.0), 3.0)) == [], "the other's turn, and its time unknown"
    assert dispatched(hand.send(TaskCompleted(0, 2, 3.0, 4.0), 4.0)) == [(2, 0)]


def test_background_jobs_share_by_weight_what_is_left() -> None:
    jobs = [
        SimulatedJob(one_lane(20), always(1.0), Share("foreground"), pause=30.0, steps=20),
        SimulatedJob(one_lane(1000), always(0.5), Share("a", 1.0, background=True), steps=None),
        SimulatedJob(one_lane(1000), always(0.5), Share("b", 3.0, background=True), steps=None),
    ]
    _, little, much = simulate_jobs(jobs)
    assert computed(much)["dev:0"] / computed(little)["dev:0"] == pytest.approx(3.0, rel=0.02)


DEVICES = ["d0", "d1"]


@pytest.mark.parametrize("order", ["strict", "hint"])
@pytest.mark.parametrize("background", [False, True])
def test_a_lane_does_not_wait_for_ever(monkeypatch, background, order):
    """The lookahead says of every lane that foreground jobs are expected there, again and again."""
    # A private name: no job can be made to be expected for ever.
    real = fair_share._fits
    monkeypatch.setattr(fair_share, "_fits", lambda flow, *others: flow.background and real(flow, *others))
    shape = Shape(2, 4, 2)
    graph = lower(find_schedule("1f1b", order=order), shape, devices=DEVICES, checkpoint=CheckpointMode.NEVER)
    jobs = [
        SimulatedJob(graph, Costs(), Share(f"job {weight}", weight, background and weight == 2), steps=6)
        for weight in (1, 2, 7)
    ]
    runs = simulate_jobs(jobs)
    assert [len(run.records) for run in runs] == [6, 6, 6]
