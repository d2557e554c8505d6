"""Random jobs on the same lanes: any graphs, shares, costs and orders of events; held against a model of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_scheduler, flows_on
from sharing_helpers import flows_of

from asyncpipe.core.engine.events import (
    Command,
    Dispatch,
    Event,
    GateOpened,
    Outcome,
    StepCancelled,
    StepCompleted,
    StepFinished,
    StepSubmitted,
    TaskCompleted,
    TaskDropped,
    TaskFailed,
    TaskIssued,
)
from asyncpipe.core.engine.scheduler import SchedulerState
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import Lane, Queue, Task
from asyncpipe.core.graph.task_graph import Phase, TaskGraph
from asyncpipe.core.policies.fair_share import MOST_AHEAD, FairShare
from asyncpipe.core.policies.share import Share
from asyncpipe.core.predict.simulate import SimulatedJob, simulate, simulate_jobs
from asyncpipe.core.schedules.protocol import HintedSchedule, OrderedSchedule, Schedule, Shape
from asyncpipe.core.schedules.registry import find_schedule

NAMES = ("", "a", "b", "c", "d")


def random_graph(draw: random.Random, *, ruled: bool = True) -> TaskGraph:
    """A graph of an ordered, hinted or ruled schedule on up to three devices, ``dev:0`` first, so that jobs meet."""
    devices = draw.randint(1, 3)
    name = draw.choice(["gpipe", "1f1b", "interleaved", "backward-first"][: 4 if ruled else 3])
    shape = Shape(devices * (2 if name == "interleaved" else 1), draw.randint(1, 4), devices)
    schedule: Schedule = find_schedule(name)
    if ruled and isinstance(schedule, OrderedSchedule) and draw.random() < 0.3:
        schedule = HintedSchedule(schedule)
    return lower(schedule, shape, checkpoint=draw.choice(list(CheckpointMode)), phase=draw.choice(list(Phase)))


def random_share(name: str, draw: random.Random) -> Share:
    return Share(name, draw.choice([0.01, 1.0, 1.0, 3.0, 100.0]), background=draw.random() < 0.35)


@dataclass
class Model:
    """What a step must look like from outside."""

    number: int
    graph: TaskGraph
    share: Share
    dispatched: list[int] = field(default_factory=list)
    issued: set[int] = field(default_factory=set)
    completed: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    opened: set[int] = field(default_factory=set)
    outcome: Outcome = Outcome.OK
    over: bool = False
    log: list[tuple[float, Event | Command]] = field(default_factory=list)
    """Its events and commands."""

    def is_ready(self, task: int) -> bool:
        """Whether an ordered graph's task may be dispatched."""
        if self.outcome is not Outcome.OK or self.over or task in self.dispatched:
            return False
        tasks = self.graph.tasks
        if task in self.graph.gates and tasks[task].microbatch not in self.opened:
            return False
        return all(
            before in (self.dispatched if tasks[before].lane.device == tasks[task].lane.device else self.issued)
            for before in self.graph.dependencies[task]
        )

    def is_under_way(self, lane: Lane) -> bool:
        """Whether there is more to come on ``lane``."""
        done = self.over or self.outcome is not Outcome.OK
        return not done and any(task.lane == lane and task.number not in self.completed for task in self.graph.tasks)


class World:
    """Jobs, scheduler and devices that report in any order; ``send`` checks every answer."""

    def __init__(self, draw: random.Random, *, ruled: bool, trouble: bool) -> None:
        self.draw, self.trouble = draw, trouble
        self.cap = draw.choice([1, 2, 3, 16])
        self.state = SchedulerState(in_flight=self.cap)
        # Which job is of which class stays as it is while its steps are under way.
        shares = {name: random_share(name, draw) for name in NAMES}
        self.to_submit = [
            (random_graph(draw, ruled=ruled), replace(shares[name], weight=draw.choice([0.01, 1.0, 3.0])))
            for name in draw.choices(NAMES, k=draw.randint(1, 5))
        ]
        self.models: dict[int, Model] = {}
        self.now = 0.0
        self.log: list[tuple[Event | None, float, list[Command]]] = []
        """Each event, or none where the scheduler was asked again, with its answer."""

    def run(self) -> None:
        while True:
            if choices := list(self.choices()):
                self.send(self.draw.choice(choices))
            elif all(model.over for model in self.models.values()):
                break
            else:
                self.wait()
        assert not self.state._steps
        for name in NAMES:
            self.state.forget(name)
        check_scheduler(self.state)
        assert not flows_of(self.state)
        assert not self.state._jobs._jobs

    def wait(self) -> None:
        """Nothing will happen any more, so the scheduler must want to look again, and then do something soon."""
        for _ in range(100):
            wake_at = self.state.wake_at(self.now)
            assert wake_at is not None, "somebody is held back for ever"
            assert wake_at > self.now
            self.now = wake_at
            commands = self.state.choose(self.now)
            self.log.append((None, self.now, commands))
            if commands:
                check_scheduler(self.state)
                return self.obey(commands)
        raise AssertionError("it looks again and again")

    def choices(self) -> Iterable[Event]:
        if self.to_submit:
            yield StepSubmitted(len(self.models), *self.to_submit[-1])
        for model in self.models.values():
            for task in sorted(model.held):
                yield TaskCompleted(model.number, task, self.now, self.now)
                if task not in model.issued:
                    yield TaskIssued(model.number, task)
                    if model.outcome is not Outcome.OK:
                        yield TaskDropped(model.number, task)
                if self.trouble and self.draw.random() < 0.05:
                    yield TaskFailed(model.number, task, RuntimeError())
            if model.over:
                continue
            for microbatch in set(range(len(model.graph.gates))) - model.opened:
                yield GateOpened(model.number, microbatch)
            if self.trouble and self.draw.random() < 0.02:
                yield StepCancelled(model.number)

    def send(self, event: Event) -> None:
        started, self.now = self.now, self.now + self.draw.choice([0.0, 0.1, 1.0, 3.0 * self.draw.random()])
        if isinstance(event, TaskCompleted):
            event = TaskCompleted(event.step, event.task, started, self.now)
        commands = self.state.handle(event, self.now)
        self.take(event)
        commands += self.state.choose(self.now)
        self.log.append((event, self.now, commands))
        check_scheduler(self.state)
        self.obey(commands)

    def take(self, event: Event) -> None:
        if isinstance(event, StepSubmitted):
            self.models[event.step] = Model(event.step, event.graph, event.share, log=[(self.now, event)])
            self.to_submit.pop()
            return
        model = self.models[event.step]
        model.log.append((self.now, event))
        if isinstance(event, GateOpened):
            model.opened.add(event.gate)
        elif isinstance(event, StepCancelled):
            finished = len(model.issued) == len(model.graph.tasks)
            model.outcome = model.outcome if finished or model.outcome is not Outcome.OK else Outcome.CANCELLED
        else:
            if isinstance(event, TaskIssued | TaskCompleted):
                model.issued.add(event.task)
            if isinstance(event, TaskCompleted):
                model.completed.add(event.task)
            if not isinstance(event, TaskIssued):
                model.held.remove(event.task)
            if isinstance(event, TaskFailed) and model.outcome is Outcome.OK:
                model.outcome = Outcome.FAILED

    def obey(self, commands: Iterable[Command]) -> None:
        for command in commands:
            self.models[command.step].log.append((self.now, command))
        for command in commands:
            model = self.models[command.step]
            if isinstance(command, Dispatch):
                self.dispatch(model, command.task)
            elif isinstance(command, StepCompleted):
                model.over = True
                assert command.outcome is model.outcome
                removed = self.state.remove(model.number)
                assert removed.journal == model.log, "the journal is every event and command, in order"
                ends = [type(entry) for _, entry in model.log if isinstance(entry, StepFinished | StepCompleted)]
                assert ends == [StepFinished, StepCompleted], "ends come behind everything else"
                if model.outcome is Outcome.OK:
                    assert sorted(model.dispatched) == list(range(len(model.graph.tasks))), "every task exactly once"

    def dispatch(self, model: Model, task: int) -> None:
        assert model.outcome is Outcome.OK
        assert task not in model.dispatched
        lane = model.graph.tasks[task].lane
        if model.graph.rule is None:
            assert model.is_ready(task)
            mine = [other for other in self.ready(lane) if other.share.job == model.share.job]
            assert model is mine[0], "older steps of a job come first"
            ready = [t.number for t in model.graph.tasks if t.lane == lane and model.is_ready(t.number)]
            assert task == min(ready), "then lower numbers"
        late = self.late(lane)
        if model.share.background:
            others = [other for other in self.models.values() if other.share.job not in late]
            held = [other.share.background for other in others for t in other.held if other.graph.tasks[t].lane == lane]
            assert held in ([], [True]), "a background task begins on an empty lane, or behind one other"
            foreground = {other.share.job for other in self.ready(lane) if not other.share.background}
            assert foreground <= late, "and where no foreground task is ready"
        model.dispatched.append(task)
        model.held.add(task)
        here = {
            other.share.job
            for other in self.models.values()
            if other.share.job and not other.share.background and other.is_under_way(lane)
        }
        room = self.cap if len(here) < 2 else min(self.cap, MOST_AHEAD)
        assert self.held(lane, late) <= room
        assert model.share.job not in late or self.held(lane, {*NAMES} - {model.share.job}) <= room

    def late(self, lane: Lane) -> set[str]:
        """The jobs whose tasks hold no place on ``lane``: they were issued there, and are late."""
        policy = self.state._lanes[lane].policy
        found = {flow.job.name for flow in flows_on(policy) if flow.is_late}
        for name in found:
            steps = [model for model in self.models.values() if model.share.job == name]
            assert any(step.graph.tasks[task].lane == lane for step in steps for task in step.held & step.issued)
        return found

    def ready(self, lane: Lane) -> list[Model]:
        """Ordered steps with something ready, oldest first."""
        return [
            model
            for model in self.models.values()
            if model.graph.rule is None
            if any(task.lane == lane and model.is_ready(task.number) for task in model.graph.tasks)
        ]

    def held(self, lane: Lane, late: Collection[str]) -> int:
        counted = [model for model in self.models.values() if model.share.job not in late]
        return sum(model.graph.tasks[task].lane == lane for model in counted for task in model.held)


worlds = st.randoms(use_true_random=False)


@settings(max_examples=60)
@given(worlds)
def test_ordered_jobs_in_any_order_of_events(draw: random.Random) -> None:
    World(draw, ruled=False, trouble=False).run()


@settings(max_examples=60)
@given(worlds)
def test_any_jobs_that_fail_or_are_cancelled_at_any_point(draw: random.Random) -> None:
    World(draw, ruled=True, trouble=True).run()


@settings(max_examples=25)
@given(worlds)
def test_a_replay_gives_the_same_answers_whatever_is_asked_in_between(draw: random.Random) -> None:
    """Answers follow from the events and their times alone, and queries change nothing."""
    world = World(draw, ruled=False, trouble=True)
    world.run()
    again = SchedulerState(in_flight=world.cap)
    for event, now, answer in world.log:
        again.wake_at(now)
        check_scheduler(again)
        for policy in [lane.policy for lane in again._lanes.values()]:
            if isinstance(policy, FairShare):
                policy.wake_at(now), policy.busy(now), policy.at_once, flows_on(policy), policy.waiting
        commands = [] if event is None else again.handle(event, now)
        assert commands + again.choose(now) == answer
        for command in answer:
            if isinstance(command, StepCompleted):
                again.remove(command.step)


def random_job(name: str, draw: random.Random) -> SimulatedJob:
    unit = draw.choice([0.1, 1.0, 7.0])
    costs = {kind: unit * draw.choice([0.0, 0.5, 1.0, draw.random()]) for kind in "FRBIWCSU"}
    noise = random.Random(draw.random())
    sigma = draw.choice([0.0, 0.3])

    def cost(task: Task) -> float:
        return costs[task.kind.value] * noise.lognormvariate(0.0, sigma)

    share = random_share(name, draw)
    return SimulatedJob(random_graph(draw), cost, share, draw.randint(1, 4), draw.choice([0.0, 1.0]), draw.random())


@settings(max_examples=60)
@given(worlds, st.integers(1, 4))
def test_jobs_get_through_in_virtual_time(draw: random.Random, count: int) -> None:
    """Also where every lane may wait for another one; each job in the order that it has when it is alone."""
    jobs = [random_job(name, draw) for name in NAMES[-count:]]
    with patch.object(SchedulerState, "choose", checked(SchedulerState.choose)):
        runs = simulate_jobs(jobs, in_flight=draw.choice([1, 2, 16]))
    for job, run in zip(jobs, runs, strict=True):
        assert len(run.records) == job.steps
        alone = compute_orders(simulate(job.graph, lambda task: 1.0).journal, job.graph)
        for record in run.records:
            tasks = sorted(entry.task for _, entry in record.journal if isinstance(entry, TaskCompleted))
            assert tasks == list(range(len(job.graph.tasks)))
            if job.graph.rule is None:
                assert compute_orders(record.journal, job.graph) == alone


def checked(
    settle: Callable[[SchedulerState, float], list[Command]],
) -> Callable[[SchedulerState, float], list[Command]]:
    def settle_and_check(self: SchedulerState, now: float) -> list[Command]:
        commands = settle(self, now)
        check_scheduler(self)
        return commands

    return settle_and_check


def compute_orders(journal: Iterable[tuple[float, object]], graph: TaskGraph) -> dict[Lane, list[int]]:
    """The tasks of each compute lane, as they were handed over."""
    orders: dict[Lane, list[int]] = {}
    for _, entry in journal:
        if isinstance(entry, Dispatch) and (lane := graph.tasks[entry.task].lane).queue is Queue.COMPUTE:
            orders.setdefault(lane, []).append(entry.task)
    return orders
