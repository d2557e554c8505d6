"""What tests of shared lanes have in common: small graphs, costs, and a scheduler that is driven by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from invariants import check_scheduler, flows_on

from asyncpipe.core.engine.events import Command, Dispatch, Event, StepSubmitted, TaskCompleted
from asyncpipe.core.engine.scheduler import SchedulerState
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import Queue, Task
from asyncpipe.core.graph.task_graph import Phase, TaskGraph
from asyncpipe.core.policies.flow import Flow
from asyncpipe.core.policies.share import Share
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.simulate import SimulatedRun
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Schedule, Shape
from asyncpipe.core.schedules.registry import find_schedule


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


def computed(run: SimulatedRun) -> dict[str, float]:
    """Device seconds of compute on each device."""
    return {lane.device: seconds for lane, seconds in run.seconds.items() if lane.queue is Queue.COMPUTE}


def spans(run: SimulatedRun, device: str = "dev:0") -> list[tuple[float, float]]:
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
        return commands + self.choose(now)

    def choose(self, now: float) -> list[Command]:
        commands = self.state.choose(now)
        check_scheduler(self.state)
        return commands

    def run_step(self, step: int, graph: TaskGraph, share: Share, start: float, seconds: float) -> None:
        """A step of one task, alone."""
        assert dispatched(self.send(StepSubmitted(step, graph, share), start)) == [(step, 0)]
        self.send(TaskCompleted(step, 0, start, start + seconds), start + seconds)
        self.state.remove(step)


def flows_of(state: SchedulerState) -> list[Flow]:
    """What each job has on the compute lanes that are shared."""
    return [
        flow for lane, each in state._lanes.items() if lane.queue is Queue.COMPUTE for flow in flows_on(each.policy)
    ]
