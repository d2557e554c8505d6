"""Several jobs on the same lanes: shares, bubbles filled, what is known of jobs; on virtual time and by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest

from asyncpipe.core.costs import Costs
from asyncpipe.core.events import (
    Command,
    Dispatch,
    Event,
    GateOpened,
    Outcome,
    StepCancelled,
    StepCompleted,
    StepRecord,
    StepSubmitted,
    TaskCompleted,
    TaskDropped,
    TaskFailed,
)
from asyncpipe.core.graph import Phase, TaskGraph
from asyncpipe.core.lanes import MOST_AHEAD
from asyncpipe.core.lower import lower
from asyncpipe.core.registry import find_schedule
from asyncpipe.core.schedule import F, HintedSchedule, OrderedSchedule, Schedule, Shape
from asyncpipe.core.scheduler import SchedulerState
from asyncpipe.core.share import Share
from asyncpipe.core.simulate import JobRun, SimulatedJob, simulate, simulate_jobs
from asyncpipe.core.task import Queue, Task
from asyncpipe.errors import OptionError

LIGHT, HEAVY = Share("light"), Share("heavy", weight=3.0)
BACKGROUND = Share("background", background=True)


def graph_of(schedule: str | Schedule, stages: int, microbatches: int, phase: Phase = Phase.STEP) -> TaskGraph:
    found = find_schedule(schedule) if isinstance(schedule, str) else schedule
    return lower(found, Shape(stages, microbatches, stages), phase=phase)


def one_lane(tasks: int, device: str = "dev:0") -> TaskGraph:
    """Forwards that are ready at once, all on one lane."""
    return lower(find_schedule("gpipe"), Shape(1, tasks, 1), devices=[device], phase=Phase.FORWARD)


def always(seconds: float) -> Callable[[Task], float]:
    return lambda task: seconds


def shaken(cost: Costs, sigma: float, seed: int) -> Callable[[Task], float]:
    """Costs that differ from task to task and from step to step."""
    draw = random.Random(seed)
    return lambda task: cost(task) * draw.lognormvariate(0.0, sigma)


def computed(run: JobRun) -> dict[str, float]:
    """Device seconds of compute on each device."""
    return {lane.device: seconds for lane, seconds in run.seconds.items() if lane.queue is Queue.COMPUTE}


def spans(run: JobRun, device: str = "dev:0") -> list[tuple[float, float]]:
    """When compute tasks on a device began and ended, of completed steps."""
    return [
        (event.started, event.ended)
        for record in run.records
        for _, event in record.journal
        if isinstance(event, TaskCompleted)
        if record.graph.tasks[event.task].lane.queue is Queue.COMPUTE
        if record.graph.tasks[event.task].lane.device == device
    ]


def step_seconds(records: Iterable[StepRecord]) -> list[float]:
    return [record.journal[-1][0] - record.journal[0][0] for record in records]


def order(record: StepRecord) -> list[int]:
    return [entry.task for _, entry in record.journal if isinstance(entry, Dispatch)]


def dispatched(commands: Iterable[Command]) -> list[tuple[int, int]]:
    return [(command.step, command.task) for command in commands if isinstance(command, Dispatch)]


class ByHand:
    """A scheduler whose every answer is settled and checked."""

    def __init__(self, in_flight: int = 16) -> None:
        self.state = SchedulerState(in_flight=in_flight)

    def send(self, event: Event, now: float) -> list[Command]:
        commands = self.state.handle(event, now)
        return commands + self.settle(now)

    def settle(self, now: float) -> list[Command]:
        commands = self.state.settle(now)
        self.state.check()
        return commands

    def run_step(self, step: int, graph: TaskGraph, share: Share, start: float, seconds: float) -> None:
        """A step of one task, alone."""
        assert dispatched(self.send(StepSubmitted(step, graph, share), start)) == [(step, 0)]
        self.send(TaskCompleted(step, 0, start, start + seconds), start + seconds)
        self.state.take_record(step)


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
    "1f1b, coarse next to fine": ("1f1b", 2, 8, Costs(0.01, 0.02), Costs(0.005, 0.011), 0.01),
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
    second = SimulatedJob(graph, heavy, HEAVY, steps=150, pause=pause)
    little, much = simulate_jobs([first, second])
    for device, seconds in computed(much).items():
        assert seconds / computed(little)[device] == pytest.approx(3.0, rel=0.05)


def test_shares_hold_where_tasks_take_different_times() -> None:
    graph, costs = graph_of("1f1b", 2, 8), Costs(0.01, 0.02, copy=0.0005)
    first = SimulatedJob(graph, shaken(costs, 0.3, seed=1), LIGHT, steps=None, pause=0.01)
    second = SimulatedJob(graph, shaken(costs, 0.3, seed=2), HEAVY, steps=150, pause=0.01)
    little, much = simulate_jobs([first, second])
    assert sum(computed(much).values()) / sum(computed(little).values()) == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("weight", [1e-3, 1.0, 1e3])
def test_nobody_starves(weight: float) -> None:
    graph = graph_of("1f1b", 2, 4)
    jobs = [
        SimulatedJob(graph, Costs(), Share("a", weight), steps=2),
        SimulatedJob(graph, Costs(), Share("b"), steps=2),
    ]
    assert [len(run.records) for run in simulate_jobs(jobs)] == [2, 2]


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
            queue += dispatched(hand.settle(now))
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


def test_a_new_job_begins_at_the_lanes_time() -> None:
    """Neither behind the others, as if it had missed all that was before it, nor in front of them."""
    jobs = [
        SimulatedJob(one_lane(200), always(1.0), Share("old"), steps=None),
        SimulatedJob(one_lane(100), always(1.0), Share("new"), start=1000.5),
    ]
    _, new = simulate_jobs(jobs)
    (seconds,) = step_seconds(new.records)
    assert seconds == pytest.approx(200, abs=20), "half of the time, behind what was handed over before"


# What one job alone sees


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "backward-first"])
def test_a_named_job_alone_runs_as_a_pipeline_by_itself(schedule: str) -> None:
    graph = graph_of(schedule, 3, 5)
    (run,) = simulate_jobs([SimulatedJob(graph, Costs(copy=0.25), Share("a", weight=7.0))])
    plain = simulate(graph, Costs(copy=0.25))
    assert run.records[0].journal[1:] == plain.journal[1:]


def test_a_job_alone_is_handed_over_far_ahead_and_two_are_not() -> None:
    hand, graph = ByHand(), one_lane(20)
    assert len(dispatched(hand.send(StepSubmitted(0, graph, Share("a")), 0.0))) == 16
    assert dispatched(hand.send(StepSubmitted(1, graph, Share("b")), 0.0)) == []
    for task in range(16 - MOST_AHEAD):
        assert dispatched(hand.send(TaskCompleted(0, task, task, task + 1.0), task + 1.0)) == []
    assert dispatched(hand.send(TaskCompleted(0, 14, 14.0, 15.0), 15.0)) == [(1, 0)]


def test_a_job_that_is_back_soon_counts_as_there() -> None:
    """Its next step would else find the lane full of the other's tasks."""
    hand, short, long = ByHand(), one_lane(1), one_lane(200)
    for step in range(3):
        hand.run_step(step, short, Share("a"), 2.0 * step, 1.0)
    # It leaves at 5, usually for 1 second.
    assert len(dispatched(hand.send(StepSubmitted(3, long, Share("b")), 5.5))) == MOST_AHEAD
    assert len(dispatched(hand.send(TaskCompleted(3, 0, 5.5, 6.4), 6.4))) == 1
    assert len(dispatched(hand.send(TaskCompleted(3, 1, 6.4, 7.5), 7.5))) == 15, "it does not come"


# Background jobs


def filler(microbatches: int = 48) -> TaskGraph:
    """Whatever is ready runs: a job with many micro-batches has something for every lane."""
    hint = find_schedule("gpipe")
    assert isinstance(hint, OrderedSchedule)
    return graph_of(HintedSchedule(hint), 4, microbatches)


FOREGROUND_COSTS = Costs(forward=0.01, backward=0.02, copy=0.0003)
FILLER_COSTS = Costs(forward=0.005, backward=0.01, copy=0.0003)


@pytest.mark.parametrize(
    ("pause", "sigma", "gets", "grows"), [(0.0, 0.0, 0.85, 1e-6), (0.01, 0.0, 0.85, 1e-6), (0.003, 0.05, 0.7, 0.01)]
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


@pytest.mark.parametrize(("seconds", "fit"), [(1.5, 6), (2.0, 4), (3.0, 3), (4.0, 2), (8.5, 1), (9.1, 0)])
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


@pytest.mark.parametrize(("seconds", "allowed"), [(1.0, True), (2.5, True), (2.6, False), (10.0, False)])
def test_a_running_task_counts_with_what_is_left_of_it_and_so_do_copies(seconds: float, allowed: bool) -> None:
    """Device 1 waits for F(0,0), which takes 3 and began 1 ago, and for C, which takes 0.5."""
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
        assert dispatched(hand.settle(33.0 + seconds)) == [(3, 0)]


def test_the_background_waits_for_a_step_that_is_due_and_as_long_again() -> None:
    hand, graph = ByHand(), one_lane(1)
    hand.run_step(0, graph, BACKGROUND, 0.0, 1.0)
    for step, start in ((1, 10.0), (2, 12.0), (3, 14.0)):
        hand.run_step(step, graph, Share("foreground"), start, 1.0)
    # It left at 15 and is due at 16.
    assert dispatched(hand.send(StepSubmitted(4, graph, BACKGROUND), 15.2)) == []
    assert hand.state.wake_at(15.2) == 17.0
    assert dispatched(hand.settle(16.9)) == []
    assert dispatched(hand.settle(17.0)) == [(4, 0)]
    assert hand.state.wake_at(17.0) is None


def test_the_background_begins_what_is_over_before_the_next_step() -> None:
    hand, graph = ByHand(), one_lane(1)
    hand.run_step(0, graph, BACKGROUND, 0.0, 0.75)
    for step, start in ((1, 10.0), (2, 12.0), (3, 14.0)):
        hand.run_step(step, graph, Share("foreground"), start, 1.0)
    assert dispatched(hand.send(StepSubmitted(4, graph, BACKGROUND), 15.25)) == [(4, 0)]


def test_what_is_not_known_holds_nobody_back() -> None:
    graph, small = graph_of("gpipe", 2, 1, Phase.FORWARD), one_lane(1, "dev:1")
    for share in (Share("new"), Share()):
        hand = ByHand()
        hand.run_step(0, small, BACKGROUND, 0.0, 1.0)
        hand.send(StepSubmitted(1, graph, share), 2.0)
        assert dispatched(hand.send(StepSubmitted(2, small, BACKGROUND), 2.0)) == [(2, 0)]
        assert hand.state.wake_at(2.0) is None


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


def test_a_ready_foreground_task_goes_first_and_a_background_task_is_alone() -> None:
    hand, graph = ByHand(), one_lane(3)
    assert dispatched(hand.send(StepSubmitted(0, graph, BACKGROUND), 0.0)) == [(0, 0)]
    assert dispatched(hand.send(StepSubmitted(1, one_lane(1), Share("foreground")), 0.0)) == [(1, 0)]
    assert dispatched(hand.send(TaskCompleted(0, 0, 0.0, 1.0), 1.0)) == []
    assert dispatched(hand.send(TaskCompleted(1, 0, 1.0, 2.0), 2.0)) == [(0, 1)]
    assert dispatched(hand.send(StepSubmitted(2, graph, Share("other", background=True)), 2.0)) == []
    assert dispatched(hand.send(TaskCompleted(0, 1, 2.0, 3.0), 3.0)) == [(2, 0)], "they take turns"


def test_background_jobs_share_by_weight_what_is_left() -> None:
    jobs = [
        SimulatedJob(one_lane(20), always(1.0), Share("foreground"), pause=30.0, steps=20),
        SimulatedJob(one_lane(1000), always(0.5), Share("a", 1.0, background=True), steps=None),
        SimulatedJob(one_lane(1000), always(0.5), Share("b", 3.0, background=True), steps=None),
    ]
    _, little, much = simulate_jobs(jobs)
    assert computed(much)["dev:0"] / computed(little)["dev:0"] == pytest.approx(3.0, rel=0.02)


def test_a_job_may_go_to_the_background_with_its_next_step() -> None:
    hand, graph = ByHand(), one_lane(2)
    for step, share in enumerate((Share("a"), Share("a", background=True))):
        commands = hand.send(StepSubmitted(step, graph, share), 10.0 * step)
        assert len(dispatched(commands)) == (1 if share.background else 2)
        for task in range(2):
            hand.send(TaskCompleted(step, task, 10.0 * step + task, 10.0 * step + task + 1), 10.0 * step + task + 1)


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
    claims = {
        claim.job.share.job: claim for claim in hand.state._jobs.claims() if claim.lane.lane.queue is Queue.COMPUTE
    }
    assert (claims["a"].in_flight, claims["a"].promised, claims["a"].visits) == (0, 0.0, [])
    assert claims["b"].virtual == 4.0
    assert len(claims["a"].lane.holding) == 1


def test_expected_is_the_mean_of_the_last_times() -> None:
    hand, graph = ByHand(), one_lane(12)
    hand.send(StepSubmitted(0, graph, Share("a")), 0.0)
    assert hand.state.expected(0, 11) is None
    for task, seconds in enumerate((2.0, 4.0, 3.0)):
        hand.send(TaskCompleted(0, task, 0.0, seconds), 9.0)
    assert hand.state.expected(0, 11) == 3.0
    for task in range(3, 11):
        hand.send(TaskCompleted(0, task, 0.0, 11.0), 99.0)
    assert 8.0 < (hand.state.expected(0, 11) or 0.0) < 11.0
    assert hand.state.expected(1, 0) is None, "there is no such step"


def test_nothing_is_measured_for_a_pipeline_by_itself() -> None:
    hand, graph = ByHand(), one_lane(2)
    hand.send(StepSubmitted(0, graph), 0.0)
    hand.send(TaskCompleted(0, 0, 0.0, 1.0), 1.0)
    assert hand.state.expected(0, 1) is None


def test_a_job_is_forgotten_when_it_is_gone() -> None:
    hand, graph = ByHand(), one_lane(1)
    hand.run_step(0, graph, Share("keeps"), 0.0, 1.0)
    for step in range(1, 200):
        share = Share(f"job {step}", background=bool(step % 2))
        hand.send(StepSubmitted(step, graph, share), step)
        hand.state.forget(share.job)
        assert hand.state.expected(step, 0) is None
        hand.settle(step + 5.0)
        hand.send(TaskCompleted(step, 0, step, step + 1.0), step + 5.0)
        hand.state.take_record(step)
    assert {claim.job.share.job for claim in hand.state._jobs.claims()} == {"keeps"}
    assert len(hand.state._jobs._known) == 1
    assert not hand.state._jobs._gone
    hand.state.forget("keeps")
    hand.state.forget("never heard of")
    assert not list(hand.state._jobs.claims())


def test_a_job_that_goes_on_is_not_forgotten() -> None:
    hand, graph = ByHand(), one_lane(1)
    hand.send(StepSubmitted(0, graph, Share("a")), 0.0)
    hand.state.forget("a")
    hand.send(StepSubmitted(1, graph, Share("a")), 0.0)
    hand.send(TaskCompleted(0, 0, 0.0, 3.0), 3.0)
    assert hand.state.expected(1, 0) == 3.0


# The simulation itself


def test_a_simulation_must_end() -> None:
    with pytest.raises(OptionError, match="give until"):
        simulate_jobs([SimulatedJob(one_lane(1), steps=None)])


def test_a_simulation_ends_in_the_middle_of_a_step() -> None:
    graph = graph_of("gpipe", 2, 1)
    (run,) = simulate_jobs([SimulatedJob(graph, Costs(forward=3, backward=5), steps=None, pause=1.0)], until=20.0)
    # A step takes 16; of the next one F(0,0) begins at 17.
    assert len(run.records) == 1
    assert computed(run) == {"dev:0": 11.0, "dev:1": 8.0}


def test_first_tasks_are_those_of_the_schedule() -> None:
    graph = graph_of("1f1b", 2, 4)
    jobs = [SimulatedJob(graph, Costs(), Share(name), steps=2) for name in "ab"]
    alone = order(simulate(graph))
    lane_of = graph.lane_of
    for run in simulate_jobs(jobs):
        for record in run.records:
            for lane in range(len(graph.lanes)):
                mine = [task for task in order(record) if lane_of[task] == lane]
                assert mine == [task for task in alone if lane_of[task] == lane]
    assert graph.tasks[alone[0]].id == graph.find(*F(0, 0)).id
