"""Steps behind each other: a device goes over to the next step when it has all compute tasks of the one before."""

from __future__ import annotations

import random
from collections import deque

import pytest
from invariants import check_scheduler

from asyncpipe.core.engine.events import (
    Command,
    Dispatch,
    Outcome,
    ProgramEnded,
    RunPrograms,
    StepCancelled,
    StepCompleted,
    StepSubmitted,
    TaskCompleted,
    TaskIssued,
)
from asyncpipe.core.engine.scheduler import SchedulerState
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.programs import programs
from asyncpipe.core.graph.task import WHOLE_STEP, Lane, Queue
from asyncpipe.core.graph.task_graph import TaskGraph, Wiring
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.policies.share import Share
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import InvalidTransition


class Devices:
    """Devices in one thread: each runs what it was handed in that order, in single tasks or by programs."""

    def __init__(
        self, draw: random.Random, *, in_flight: int = 16, by_program: bool = False, share: Share | None = None
    ):
        self.state = SchedulerState(in_flight=in_flight)
        self.draw, self.by_program, self.share = draw, by_program, share or Share()
        self.graphs: dict[int, TaskGraph] = {}
        self.queues: dict[str, deque[tuple[int, int]]] = {}
        self.runs: dict[tuple[int, str], deque[int]] = {}
        self.begun: list[tuple[int, int]] = []
        self.ends: dict[int, StepCompleted] = {}
        self.issued: list[tuple[int, int]] = []
        self.done: set[tuple[int, int]] = set()
        self.after: dict[int, int | None] = {}
        self.held: set[tuple[int, int]] = set()

    def submit(self, step: int, graph: TaskGraph, after: int | None) -> None:
        self.graphs[step], self.after[step] = graph, after
        self.take(self.state.handle(StepSubmitted(step, graph, self.share, self.by_program, after), 0.0))

    def handle(self, event: object) -> None:
        self.take(self.state.handle(event, 0.0))  # type: ignore[arg-type]

    def take(self, commands: list[Command]) -> None:
        commands = commands + self.state.choose(0.0)
        check_scheduler(self.state)
        for command in commands:
            graph = self.graphs[command.step]
            if isinstance(command, Dispatch):
                lane = graph.tasks[command.task].lane
                self.queues.setdefault(lane.device, deque()).append((command.step, command.task))
            elif isinstance(command, RunPrograms):
                for program in programs(graph).programs:
                    self.runs[command.step, graph.devices[program.device]] = deque(program.tasks)
            elif isinstance(command, StepCompleted):
                self.ends[command.step] = command
                self.state.remove(command.step)

    def able(self) -> list[tuple[str, int, int]]:
        """What devices can begin now: (device, step, task)."""
        found = []
        for device, queue in self.queues.items():
            if queue:
                found.append((device, *queue[0]))
        for (step, device), tasks in self.runs.items():
            before = self.after[step]
            if before is not None and (before, device) in self.runs:
                continue
            graph = self.graphs[step]
            if tasks and all((step, before) in self.done for before in graph.dependencies[tasks[0]]):
                found.append((device, step, tasks[0]))
        return [able for able in found if able[1:] not in self.held]

    def go_on(self) -> None:
        """One device does one thing."""
        if self.issued and (self.draw.random() < 0.5 or not self.able()):
            step, task = self.issued.pop(self.draw.randrange(len(self.issued)))
            self.handle(TaskCompleted(step, task, 0.0, 0.0))
            return
        if not (able := self.able()):
            return
        device, step, task = self.draw.choice(able)
        mine = self.runs[step, device] if (step, device) in self.runs else self.queues[device]
        mine.popleft()
        self.begun.append((step, task))
        self.done.add((step, task))
        if self.draw.random() < 0.3:
            self.handle(TaskIssued(step, task))
            self.issued.append((step, task))
        else:
            self.handle(TaskCompleted(step, task, 0.0, 0.0))
        if (step, device) in self.runs and not self.runs[step, device]:
            del self.runs[step, device]
            self.handle(ProgramEnded(step))

    def check_order(self, steps: int) -> None:
        """On no device does compute of a later step begin before all compute of an earlier one."""
        last: dict[str, int] = {}
        counts: dict[tuple[int, str], int] = {}
        for step, task in self.begun:
            lane = self.graphs[step].tasks[task].lane
            if lane.queue is Queue.COMPUTE:
                assert last.get(lane.device, 0) <= step
                last[lane.device] = step
                counts[step, lane.device] = counts.get((step, lane.device), 0) + 1
        for (step, device), count in counts.items():
            lane = Lane(device, Queue.COMPUTE)
            whole = sum(task.lane == lane for task in self.graphs[step].tasks)
            assert count == whole or not any(after > step and where == device for after, where in counts)


def devices(way: str) -> Devices:
    share = Share(job="a") if way == "shared" else None
    return Devices(random.Random(0), by_program=way == "programs", share=share)


@pytest.mark.parametrize("way", ["single", "programs", "shared"])
def test_a_device_at_its_end_does_not_wait_for_the_others(way: str) -> None:
    pipes = devices(way)
    graph = lower(find_schedule("1f1b"), Shape(2, 4, 2), wiring=Wiring(((0, 1),), (), (0, 1)))
    update = graph.find(TaskKind.UPDATE, WHOLE_STEP, 1).number
    pipes.held = {(0, update)}  # What the last stage does last does not come to its end.
    pipes.submit(0, graph, None)
    pipes.submit(1, graph, 0)
    for _ in range(500):
        pipes.go_on()
    ran = {graph.tasks[task].id for step, task in pipes.begun if step == 1}
    # Nothing ran yet that needs the stage whose update is late.
    assert {"F(0,0)", "F(1,0)"} <= ran
    assert not any(",1)" in task for task in ran if not task.startswith("C"))
    pipes.held = set()
    while len(pipes.ends) < 2:
        pipes.go_on()
    pipes.check_order(2)


def test_single_tasks_wait_for_the_end_of_programs() -> None:
    """A job with a name joins, so the next step goes task by task: its tasks would overtake a program that waits."""
    draw = random.Random(0)
    graph = lower(find_schedule("1f1b"), Shape(2, 4, 2), wiring=Wiring(((0, 1),), (), (0, 1)))
    pipes = Devices(draw, by_program=True)
    pipes.submit(0, graph, None)
    pipes.share = Share(job="a")
    pipes.submit(1, graph, 0)
    while pipes.runs:
        assert all(step == 0 for step, _ in pipes.begun)
        pipes.go_on()
    while len(pipes.ends) < 2:
        pipes.go_on()
    assert all(end.outcome is Outcome.OK for end in pipes.ends.values())


def test_what_cannot_be_followed_is_refused() -> None:
    ordered = lower(find_schedule("1f1b"), Shape(2, 2, 2))
    ruled = lower(find_schedule("backward-first"), Shape(2, 2, 2))
    state = SchedulerState()
    state.handle(StepSubmitted(0, ordered), 0.0)
    with pytest.raises(InvalidTransition, match="where a rule decides"):
        state.handle(StepSubmitted(1, ruled, after=0), 0.0)
    with pytest.raises(InvalidTransition, match="not submitted"):
        state.handle(StepSubmitted(1, ordered, after=1), 0.0)
    state.handle(StepSubmitted(1, ordered, after=0), 0.0)
    with pytest.raises(InvalidTransition, match="followed by another"):
        state.handle(StepSubmitted(2, ordered, after=0), 0.0)
    state.handle(StepCancelled(0), 0.0)
    with pytest.raises(InvalidTransition, match="not running"):
        state.handle(StepSubmitted(2, ordered, after=1), 0.0)
