"""Several schedulers, each with a part of the steps, in one virtual process: their devices and messages in any order.

The workers here follow the rules of ``runtime/program_run.py`` and ``Driver``, and nothing else: an event is in the
inbox before anything is released that waits for it, a message included; a step stands still before it is cancelled or
fails; what comes before its step waits for it, and what comes after its end is ignored. In place of a controller, the
world's ``doom`` cancels a step elsewhere when one worker has given it up.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_scheduler
from random_graphs import random_graph, random_partition

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
from asyncpipe.core.graph.part import Departure, Part, part
from asyncpipe.core.graph.programs import Program, Programs, programs
from asyncpipe.core.graph.task import Queue
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.policies.share import Share
from asyncpipe.core.predict.simulate import can_overlap
from asyncpipe.core.records.step_record import StepRecord, remove_record

Choice = Callable[[], object]


@dataclass(eq=False)
class Step:
    """One worker's part of a step."""

    number: int
    whole: TaskGraph
    part: Part
    aborted: bool = False
    stopped: bool = False
    programs: Programs | None = None
    runs: list[Run] = field(default_factory=list)
    issued: list[int] = field(default_factory=list)
    """Tasks that are issued and not completed."""
    callers: list[int] = field(default_factory=list)
    """The caller's gates that are closed."""
    sent: dict[int, int] = field(default_factory=dict)
    """How many of the messages for one task are sent."""
    ended: StepCompleted | None = None


@dataclass(eq=False)
class Run:
    step: Step
    program: Program
    awaits: list[int]
    before: Run | None
    position: int = 0

    @property
    def is_at_end(self) -> bool:
        return self.position == len(self.awaits)


@dataclass(eq=False)
class Device:
    single: deque[tuple[Step, int]] = field(default_factory=deque)
    runs: list[Run] = field(default_factory=list)
    running: tuple[Step, int, Run | None] | None = None


class Worker:
    """A scheduler, a driver's inbox and devices, and what has come too early."""

    def __init__(self, world: World, devices: list[str]) -> None:
        self.world, self.draw, self.names = world, world.draw, devices
        self.state = SchedulerState(in_flight=self.draw.choice([1, 2, 16]))
        self.takes_programs = self.draw.random() < 0.6
        self.devices = {name: Device() for name in devices}
        self.steps: dict[int, Step] = {}
        self.next = 0
        self.early: dict[int, list[tuple[int, int]]] = {}
        self.inbox: deque[Event] = deque()

    # The driver

    def choices(self) -> list[Choice]:
        found: list[Choice] = []
        if self.may_submit():
            found.append(self.submit)
        if self.inbox:
            found.append(lambda: self.deliver(self.draw.randint(1, len(self.inbox))))
        for step in self.steps.values():
            if step.ended is None:
                found += [lambda step=step, gate=gate: self.open_callers(step, gate) for gate in step.callers]
                if self.draw.random() < self.world.trouble:
                    found.append(lambda step=step: self.cancel(step))
            found += [lambda step=step, task=task: self.complete(step, task) for task in step.issued]
        for device in self.devices.values():
            found += self.device_choices(device)
        return found

    def may_submit(self) -> bool:
        while self.next in self.world.doomed:
            self.early.pop(self.next, None)
            self.next += 1
        if self.next == len(self.world.graphs):
            return False
        return self.world.how != "after" or all(step.ended for step in self.steps.values())

    def submit(self) -> None:
        number, graph = self.next, self.world.graphs[self.next]
        self.next += 1
        cut = part(graph, [name for name in self.names if name in graph.devices])
        step = self.steps[number] = Step(number, graph, cut)
        step.callers = list(range(len(cut.graph.gates) - len(cut.arrivals)))
        after = number - 1 if self.world.how == "behind" and number else None
        self.handle(StepSubmitted(number, cut.graph, self.world.shares[number], self.takes_programs, after))
        for departure in cut.at_start:
            self.send(step, departure)
        for message in self.early.pop(number, []):
            self.arrive(number, message)

    def arrive(self, number: int, message: tuple[int, int]) -> None:
        """A message is there: what the receiver's thread does, at any time."""
        if number >= self.next:
            self.early.setdefault(number, []).append(message)
        elif number in self.steps:
            step = self.steps[number]
            self.open(step, step.part.arrivals[message])

    def open(self, step: Step, gate: int) -> None:
        self.inbox.append(GateOpened(step.number, gate))
        if step.runs:
            assert step.programs is not None
            program, position = step.programs.gates[gate]
            step.runs[program].awaits[position] -= 1

    def open_callers(self, step: Step, gate: int) -> None:
        step.callers.remove(gate)
        self.world.opened.add((step.number, step.part.whole[step.part.graph.gates[gate]]))
        self.open(step, gate)

    def deliver(self, events: int) -> None:
        for _ in range(events):
            event = self.inbox.popleft()
            if isinstance(event, GateOpened) and self.steps[event.step].ended is not None:
                continue
            self.handle(event)

    def handle(self, event: Event) -> None:
        world = self.world
        world.now += 1.0
        self.obey(self.state.handle(event, world.now))
        self.obey(self.state.choose(world.now))
        check_scheduler(self.state)

    def obey(self, commands: list[Command]) -> None:
        for command in commands:
            step = self.steps[command.step]
            graph = step.part.graph
            if isinstance(command, Dispatch):
                assert not step.runs, "what a device has by its program is not handed over again"
                self.devices[graph.tasks[command.task].lane.device].single.append((step, command.task))
            elif isinstance(command, RunPrograms):
                self.run_programs(step)
            elif isinstance(command, Abort):
                step.aborted = step.stopped = True
                self.world.doom(step.number)
            elif isinstance(command, StepCompleted):
                step.ended = command
                record = remove_record(self.state, step.number)
                done = [event.task for _, event in record.journal if isinstance(event, TaskCompleted)]
                assert command.outcome is not Outcome.OK or sorted(done) == list(range(len(graph.tasks)))
                if step.runs and self.world.how != "behind":
                    replay(record, command)
            else:
                assert isinstance(command, StepFinished)

    def run_programs(self, step: Step) -> None:
        step.programs = programs(step.part.graph)
        earlier = self.steps.get(step.number - 1) if self.world.how == "behind" else None
        before = {run.program.device: run for run in earlier.runs} if earlier is not None else {}
        for program in step.programs.programs:
            run = Run(step, program, list(program.awaits), before.get(program.device))
            step.runs.append(run)
            self.devices[step.whole.devices[program.device]].runs.append(run)

    def send(self, step: Step, departure: Departure) -> None:
        """Send a message, with tensors if they are complete."""
        sent = step.sent[departure.task] = step.sent.get(departure.task, 0) + 1
        self.world.send(self, step.number, departure, departure.tensors and sent == departure.among)

    def behind(self, step: Step) -> list[Step]:
        """The step and those behind it that run by programs as it does."""
        later = self.steps.get(step.number + 1)
        goes_on = self.world.how == "behind" and later is not None and step.runs and later.runs
        return [step, *self.behind(later)] if goes_on and later is not None else [step]

    def abort(self, step: Step) -> None:
        """As ``Execution.aborted``: the steps behind are aborted as well."""
        for each in self.behind(step):
            each.aborted = True

    def cancel(self, step: Step) -> None:
        """As ``Driver.cancel``."""
        if step.runs:
            self.abort(step)
            self.deliver(len(self.inbox))
        for each in self.behind(step):
            if each.ended is None:
                self.handle(StepCancelled(each.number))

    # The devices

    def device_choices(self, device: Device) -> list[Choice]:
        if device.running is not None:
            found: list[Choice] = [lambda: self.end(device)] * 3
            if self.draw.random() < self.world.trouble:
                found.append(lambda: self.fail(device))
            return found
        found = [lambda: self.begin_single(device)] if device.single else []
        for run in device.runs:
            if run.step.stopped or run.is_at_end:
                found.append(lambda run=run: self.leave(device, run))
            elif not (run.step.aborted or run.awaits[run.position] or (run.before and not run.before.is_at_end)):
                found.append(lambda run=run: self.begin(device, run))
        return found

    def begin_single(self, device: Device) -> None:
        step, task = device.single.popleft()
        if step.aborted:
            self.inbox.append(TaskDropped(step.number, task))
        else:
            device.running = step, task, None
            self.world.begin(step, task)

    def begin(self, device: Device, run: Run) -> None:
        task = run.program.tasks[run.position]
        device.running = run.step, task, run
        run.position += 1
        self.world.begin(run.step, task)

    def end(self, device: Device) -> None:
        assert device.running is not None
        (step, task, run), device.running = device.running, None
        self.world.issued.add((step.number, step.part.whole[task]))
        if self.draw.random() < 0.3:
            self.inbox.append(TaskIssued(step.number, task))
            step.issued.append(task)
        else:
            self.completed(step, task)
        if run is not None and not step.aborted:
            for other, place in run.program.releases[run.position - 1]:
                step.runs[other].awaits[place] -= 1
        if step.whole.rule is None:
            self.depart(step, task)

    def completed(self, step: Step, task: int) -> None:
        self.inbox.append(TaskCompleted(step.number, task, self.world.now, self.world.now))
        self.world.completed.add((step.number, step.part.whole[task]))
        if step.whole.rule is not None:
            self.depart(step, task)

    def depart(self, step: Step, task: int) -> None:
        if not step.aborted:
            for departure in step.part.departures[task]:
                self.send(step, departure)

    def complete(self, step: Step, task: int) -> None:
        """An asynchronous device is done with a task, or fails late."""
        step.issued.remove(task)
        if self.draw.random() < self.world.trouble:
            if step.runs:
                self.abort(step)
            self.inbox.append(TaskFailed(step.number, task, RuntimeError("late")))
        else:
            self.completed(step, task)

    def fail(self, device: Device) -> None:
        assert device.running is not None
        (step, task, run), device.running = device.running, None
        if run is not None:
            self.abort(step)
        self.world.failed.add((step.number, step.part.whole[task]))
        self.inbox.append(TaskFailed(step.number, task, RuntimeError("no")))

    def leave(self, device: Device, run: Run) -> None:
        device.runs.remove(run)
        self.inbox.append(ProgramEnded(run.step.number, run.program.tasks[run.position :]))


class World:
    """Workers and what is under way between them, and what a controller knows."""

    def __init__(self, draw: random.Random, trouble: float) -> None:
        self.draw, self.trouble = draw, trouble
        ruled = draw.choice([0.0, 0.5])
        self.graphs = [random_graph(draw, 5, ruled) for _ in range(draw.randint(1, 3))]
        able = all(can_overlap(graph) for graph in self.graphs)
        self.how = draw.choice(["beside", "after", *["behind"] * (3 * able)])
        jobs = draw.choice([[""], [""], ["", "a", "b"]])
        self.shares = [Share(draw.choice(jobs)) for _ in self.graphs]
        devices = max((graph.devices for graph in self.graphs), key=len)
        self.now = 0.0
        self.workers = [Worker(self, names) for names in random_partition(devices, draw)]
        self.home = {name: worker for worker in self.workers for name in worker.names}
        self.in_order = draw.random() < 0.5
        self.flights: dict[tuple[Worker, Worker], deque[tuple[int, Departure, bool]]] = {}
        self.doomed: set[int] = set()
        self.to_cancel: list[tuple[Worker, int]] = []
        self.opened: set[tuple[int, int]] = set()
        self.begun: set[tuple[int, int]] = set()
        self.issued: set[tuple[int, int]] = set()
        self.completed: set[tuple[int, int]] = set()
        self.failed: set[tuple[int, int]] = set()
        self.brought: set[tuple[int, int]] = set()
        """Copies whose tensors have come from another worker."""

    def run(self) -> None:
        while True:
            found = [choice for worker in self.workers for choice in worker.choices()]
            found += [lambda pair=pair: self.land(pair) for pair, flights in self.flights.items() if flights]
            found += [lambda order=order: self.cancel(*order) for order in self.to_cancel]
            if found:
                self.draw.choice(found)()
            elif not self.wake():
                break
        for worker in self.workers:
            assert all(step.ended for step in worker.steps.values()), "every step comes to its end"
            assert not worker.state._steps
            assert not worker.inbox
            assert not worker.early
            assert not any(device.single or device.runs or device.running for device in worker.devices.values())

    def wake(self) -> bool:
        """Ask policies that held a task back for one that has not come; false if none did."""
        for worker in self.workers:
            if (at := worker.state.wake_at(self.now)) is not None:
                self.now = max(self.now, at)
                worker.obey(worker.state.choose(self.now))
                return True
        return False

    def send(self, sender: Worker, step: int, departure: Departure, brings: bool) -> None:
        receiver = self.home[departure.device]
        assert receiver is not sender, "what stays in a part is no message"
        if brings:
            for read in self.graphs[step].read_by(departure.task):
                assert (step, read) in self.issued, "tensors leave when they are complete"
        self.flights.setdefault((sender, receiver), deque()).append((step, departure, brings))

    def land(self, pair: tuple[Worker, Worker]) -> None:
        flights = self.flights[pair]
        if not self.in_order:
            flights.rotate(self.draw.randrange(len(flights)))
        step, departure, brings = flights.popleft()
        if brings:
            self.brought.add((step, departure.task))
        pair[1].arrive(step, (departure.task, departure.dependency))

    def begin(self, step: Step, task: int) -> None:
        """A device begins a task: what it needs must be there, wherever it was made."""
        number, graph, whole = step.number, step.whole, step.part.whole[task]
        assert (number, whole) not in self.begun, "every task runs once"
        self.begun.add((number, whole))
        ready = self.issued if graph.rule is None else self.completed
        # What a device has behind a single task that failed, it begins until the scheduler has heard of that.
        assert all((number, before) in ready or (number, before) in self.failed for before in graph.dependencies[whole])
        assert whole not in graph.gates or (number, whole) in self.opened
        found, made = graph.tasks[whole], self.home[graph.tasks[whole].lane.device]
        if found.source is not None and self.home[graph.devices[graph.placement[found.source]]] is not made:
            assert (number, whole) in self.brought, "a copy from another worker has its tensors"
        if self.how == "behind" and number and found.lane.queue is Queue.COMPUTE:
            for other in self.graphs[number - 1].tasks:
                assert other.lane != found.lane or (number - 1, other.number) in self.begun

    def doom(self, step: int) -> None:
        """A worker has given the step up: the others are to do so, and with it those behind it."""
        for number in range(step, len(self.graphs) if self.how == "behind" else step + 1):
            if number not in self.doomed:
                self.doomed.add(number)
                self.to_cancel += [(worker, number) for worker in self.workers]

    def cancel(self, worker: Worker, number: int) -> None:
        self.to_cancel.remove((worker, number))
        if number in worker.steps:
            worker.cancel(worker.steps[number])


worlds = st.randoms(use_true_random=True)
"""Seeds: to draw each choice from Hypothesis would take most of the time."""


@pytest.mark.promise(
    "Bit-identical results",
    "Dispatching a step as whole programs makes the same state transitions as dispatching each task.",
)
@settings(max_examples=70)
@given(worlds)
def test_parts_run_together_as_the_whole_graph_does(draw: random.Random) -> None:
    world = World(draw, 0.0)
    world.run()
    assert not world.doomed
    for number, graph in enumerate(world.graphs):
        assert all((number, task) in world.completed for task in range(len(graph.tasks)))
        assert all(worker.steps[number].ended.outcome is Outcome.OK for worker in world.workers)  # type: ignore[union-attr]


@settings(max_examples=60)
@given(worlds, st.sampled_from([0.01, 0.05]))
def test_a_step_that_one_part_gives_up_ends_in_all_of_them(draw: random.Random, trouble: float) -> None:
    world = World(draw, trouble)
    world.run()
    for number, graph in enumerate(world.graphs):
        if number not in world.doomed:
            assert all((number, task) in world.completed for task in range(len(graph.tasks)))


def replay(record: StepRecord, ended: StepCompleted) -> None:
    """Give the events of a program's journal to a scheduler that dispatches one by one, without a cap in reach.

    It must take them all, and dispatch the same tasks at the same events.
    """
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
            check_scheduler(one_by_one)
    assert {command for command in found if isinstance(command, Dispatch)} == set(noted)
    assert len(noted) == len(set(noted)), "each task is dispatched at most once"
    assert found.count(Abort(record.step)) == aborts == (ended.outcome is not Outcome.OK)
    assert found[-1] == ended, "the step ends alike"
    assert ended.outcome is not Outcome.OK or len(noted) == len(record.graph.tasks)
