"""Steps by programs and one by one, at a time, on devices that do what they may in any order: the same transitions.

The devices here follow the rules of ``runtime/program_run.py``, and nothing else: an event is in the inbox before
anything is released that waits for it, and a step stands still before it is cancelled or fails. Events are handled some
at a time, as the loop does. Afterwards the events of each program's journal are given to a scheduler that dispatches
one by one: it must take them all, and dispatch the same tasks at the same events.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph

from asyncpipe.core.engine.events import (
    Abort,
    Command,
    Dispatch,
    Event,
    GateOpened,
    Outcome,
    ProgramEnded,
    RunPrograms,
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
from asyncpipe.core.graph.programs import Program, programs
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.policies.share import Share
from asyncpipe.core.records.step_record import StepRecord, remove_record


@dataclass(eq=False)
class Step:
    """What the driver and the devices know of a step."""

    number: int
    graph: TaskGraph
    aborted: bool = False
    stopped: bool = False
    runs: list[Run] = field(default_factory=list)
    issued: list[int] = field(default_factory=list)
    """Tasks that are issued and not completed."""
    gates: list[int] = field(default_factory=list)
    ended: StepCompleted | None = None
    record: StepRecord | None = None


@dataclass(eq=False)
class Run:
    step: Step
    program: Program
    awaits: list[int]
    position: int = 0


@dataclass(eq=False)
class Device:
    single: deque[tuple[Step, int]] = field(default_factory=deque)
    runs: list[Run] = field(default_factory=list)
    running: tuple[Step, int, Run | None] | None = None


class World:
    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.state = SchedulerState(in_flight=draw.choice([1, 2, 16]))
        self.graphs = [random_graph(draw) for _ in range(draw.randint(1, 4))]
        self.devices: dict[str, Device] = {}
        self.steps: list[Step] = []
        self.inbox: deque[Event] = deque()
        self.trouble = draw.choice([0.0, 0.0, 0.01, 0.05])
        self.now = 0.0

    # The driver

    def run(self) -> None:
        while True:
            if choices := self.choices():
                self.draw.choice(choices)()
            elif (at := self.state.wake_at(self.now)) is not None:
                self.now = at  # A task was held back for one that has not come.
                self.obey(self.state.choose(at))
            else:
                break
        assert not self.inbox
        assert all(step.ended is not None for step in self.steps), "every step comes to its end"
        assert self.state.idle

    def choices(self) -> list[Callable[[], object]]:
        found: list[Callable[[], object]] = []
        if self.graphs:
            found.append(self.submit)
        if self.inbox:
            found.append(lambda: self.deliver(self.draw.randint(1, len(self.inbox))))
        for step in self.steps:
            if step.ended is None:
                found += [lambda step=step, gate=gate: self.open(step, gate) for gate in step.gates]
                if self.draw.random() < self.trouble:
                    found.append(lambda step=step: self.cancel(step))
            found += [lambda step=step, task=task: self.complete(step, task) for task in step.issued]
        for device in self.devices.values():
            found += self.device_choices(device)
        return found

    def submit(self) -> None:
        graph = self.graphs.pop()
        step = Step(len(self.steps), graph, gates=list(range(len(graph.gates))))
        self.steps.append(step)
        share = Share(self.draw.choice(["a", "b"])) if self.draw.random() < 0.15 else Share()
        self.handle(StepSubmitted(step.number, graph, share, programs=self.draw.random() < 0.8))

    def deliver(self, events: int) -> None:
        for _ in range(events):
            self.handle(self.inbox.popleft())

    def handle(self, event: Event) -> None:
        self.now += 1.0
        self.obey(self.state.handle(event, self.now))
        self.obey(self.state.choose(self.now))
        self.state.check()

    def obey(self, commands: list[Command]) -> None:
        for command in commands:
            step = self.steps[command.step]
            if isinstance(command, Dispatch):
                assert not step.runs, "what a device has by its program is not handed over again"
                name = step.graph.tasks[command.task].lane.device
                self.devices.setdefault(name, Device()).single.append((step, command.task))
            elif isinstance(command, RunPrograms):
                step.runs = [Run(step, program, list(program.awaits)) for program in programs(step.graph).programs]
                for run in step.runs:
                    name = step.graph.devices[run.program.device]
                    self.devices.setdefault(name, Device()).runs.append(run)
            elif isinstance(command, Abort):
                step.aborted = step.stopped = True
            elif isinstance(command, StepCompleted):
                step.ended = command
                step.record = remove_record(self.state, step.number)
            else:
                assert isinstance(command, StepFinished)

    def open(self, step: Step, gate: int) -> None:
        step.gates.remove(gate)
        self.handle(GateOpened(step.number, gate))
        for run in step.runs:
            if step.graph.gates[gate] in run.program.tasks:
                run.awaits[run.program.tasks.index(step.graph.gates[gate])] -= 1

    def stand_still(self, step: Step) -> None:
        if step.runs:
            step.aborted = True
            self.deliver(len(self.inbox))

    def cancel(self, step: Step) -> None:
        self.stand_still(step)
        if step.ended is None:
            self.handle(StepCancelled(step.number))

    def give_up(self, device: Device) -> None:
        """The watchdog does, since the running task hangs."""
        assert device.running is not None
        step, task, _ = device.running
        device.running = None
        self.deliver(len(self.inbox))
        assert self.state.holds(step.number, task)
        self.stand_still(step)
        self.handle(TaskFailed(step.number, task, RuntimeError("hung")))

    # The devices

    def device_choices(self, device: Device) -> list[Callable[[], object]]:
        if device.running is not None:
            found: list[Callable[[], object]] = [lambda: self.end(device)] * 3
            if self.draw.random() < self.trouble:
                found += [lambda: self.fail(device), lambda: self.give_up(device)]
            return found
        found = [lambda: self.begin_single(device)] if device.single else []
        for run in device.runs:
            if run.step.stopped or run.position == len(run.awaits):
                found.append(lambda run=run: self.leave(device, run))
            elif not (run.step.aborted or run.awaits[run.position]):
                found.append(lambda run=run: self.begin(device, run))
        return found

    def begin_single(self, device: Device) -> None:
        step, task = device.single.popleft()
        if step.aborted:
            self.inbox.append(TaskDropped(step.number, task))
        else:
            device.running = step, task, None

    def begin(self, device: Device, run: Run) -> None:
        device.running = run.step, run.program.tasks[run.position], run
        run.position += 1

    def end(self, device: Device) -> None:
        assert device.running is not None
        (step, task, run), device.running = device.running, None
        if self.draw.random() < 0.3:
            self.inbox.append(TaskIssued(step.number, task))
            step.issued.append(task)
        else:
            self.inbox.append(TaskCompleted(step.number, task, self.now, self.now))
        if run is not None and not step.aborted:
            for other, place in run.program.releases[run.position - 1]:
                step.runs[other].awaits[place] -= 1

    def fail(self, device: Device) -> None:
        assert device.running is not None
        (step, task, run), device.running = device.running, None
        step.aborted = step.aborted or run is not None
        self.inbox.append(TaskFailed(step.number, task, RuntimeError("no")))

    def complete(self, step: Step, task: int) -> None:
        """An asynchronous device is done with a task, or fails late."""
        step.issued.remove(task)
        if self.draw.random() < self.trouble:
            step.aborted = step.aborted or bool(step.runs)
            self.inbox.append(TaskFailed(step.number, task, RuntimeError("late")))
        else:
            self.inbox.append(TaskCompleted(step.number, task, self.now, self.now))

    def leave(self, device: Device, run: Run) -> None:
        device.runs.remove(run)
        self.inbox.append(ProgramEnded(run.step.number, run.program.tasks[run.position :]))


@settings(max_examples=100)
@given(st.randoms(use_true_random=False))
def test_programs_and_dispatch_one_by_one_make_the_same_transitions(draw: random.Random) -> None:
    world = World(draw)
    world.run()
    for step in world.steps:
        assert step.ended is not None
        assert step.record is not None
        if step.runs:
            replay(step.record, step.ended)


def replay(record: StepRecord, ended: StepCompleted) -> None:
    """Give the events of ``record`` to a scheduler that dispatches one by one, without a cap in reach."""
    one_by_one = SchedulerState(in_flight=len(record.graph.tasks) + 1)
    found: list[Command] = []
    noted: list[Dispatch] = []
    aborts = 0
    for at, entry in record.journal:
        if isinstance(entry, Dispatch):
            noted.append(entry)
        elif isinstance(entry, Abort):
            aborts += 1
        elif not isinstance(entry, RunPrograms | StepFinished | StepCompleted):
            assert {command for command in found if isinstance(command, Dispatch)} == set(noted)
            event = StepSubmitted(entry.step, entry.graph) if isinstance(entry, StepSubmitted) else entry
            found += one_by_one.handle(event, at)
            one_by_one.check()
    assert {command for command in found if isinstance(command, Dispatch)} == set(noted)
    assert len(noted) == len(set(noted)), "each task is dispatched at most once"
    assert found.count(Abort(record.step)) == aborts == (ended.outcome is not Outcome.OK)
    assert found[-1] == ended, "the step ends alike"
    if ended.outcome is Outcome.OK:
        assert len(noted) == len(record.graph.tasks)
