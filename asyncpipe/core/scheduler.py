"""The scheduler: which task goes to which device, and when. Pure: events in, commands out.

States of a task; dependents on other devices are released at *issued*, those on the same device, which runs
what it is handed in order, already at *dispatched*::

    waiting ──▶ ready ──▶ dispatched ──▶ issued ──▶ completed
                              │  └──────────┼──────▶ completed     (a CPU does both at once)
                              ├─────────────┴──────▶ failed
                              └────────────────────▶ dropped       (only while the step drains)

States of a step; it drains when a task fails or the step is cancelled: nothing is dispatched any more and
what devices still hold comes back completed, failed or dropped::

    running ──▶ finished ──▶ completed
       └──────▶ draining ──▶ completed

Guarantees: a task is dispatched after every dependency on another device was issued and every dependency on
its own device was dispatched; among ready tasks of a lane, older steps come first, then lower task numbers
(clock cycles); at most ``in_flight`` tasks of a lane are dispatched and not completed, over all steps; an
event that cannot follow what happened raises ``InvalidTransition`` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heappop, heappush

from asyncpipe.core.events import (
    Abort,
    Command,
    Dispatch,
    Event,
    GateOpened,
    Outcome,
    StepCancelled,
    StepCompleted,
    StepFinished,
    StepRecord,
    StepSubmitted,
    TaskCompleted,
    TaskDropped,
    TaskFailed,
    TaskIssued,
)
from asyncpipe.core.graph import TaskGraph
from asyncpipe.core.task import Lane
from asyncpipe.errors import InvalidTransition, OptionError

__all__ = ["SchedulerState", "TaskState"]


class TaskState(IntEnum):
    """Where a task of a running step stands."""

    WAITING = 0
    READY = 1
    DISPATCHED = 2
    ISSUED = 3
    COMPLETED = 4
    FAILED = 5
    DROPPED = 6


# Module constants: an enum attribute costs a lookup in the hottest loop.
_WAITING, _READY, _DISPATCHED, _ISSUED, _COMPLETED, _FAILED, _DROPPED = TaskState


@dataclass(slots=True, eq=False)
class _Lane:
    """A lane's ready tasks, lowest (step, task number) first, and how many tasks its device holds."""

    lane: Lane
    ready: list[tuple[int, int, _Step]] = field(default_factory=list)
    in_flight: int = 0


@dataclass(slots=True, eq=False)
class _Step:
    number: int
    graph: TaskGraph
    lanes: list[_Lane]
    """The lane of each task."""
    unmet: list[int]
    """How many dependencies of each task still hold it back."""
    states: list[TaskState]
    journal: list[tuple[float, Event | Command]] = field(default_factory=list)
    outcome: Outcome = Outcome.OK
    failed_task: int | None = None
    error: BaseException | None = None
    to_issue: int = 0
    held: int = 0
    """Tasks dispatched and neither completed, failed nor dropped."""
    finished: bool = False
    closed_gates: set[int] = field(default_factory=set)
    """Micro-batches whose gradient the caller has not given yet."""


class SchedulerState:
    """Decides for any number of steps at a time on shared lanes. Mutated only by ``handle``; not thread-safe."""

    def __init__(self, *, in_flight: int = 16) -> None:
        """``in_flight`` bounds the tasks of a lane that its device holds: how far the host runs ahead."""
        if in_flight < 1:
            raise OptionError(f"in_flight must be a positive integer, got {in_flight}")
        self._cap = in_flight
        self._steps: dict[int, _Step] = {}
        self._lanes: dict[Lane, _Lane] = {}
        self._last_step = -1

    @property
    def idle(self) -> bool:
        """Whether no step is under way."""
        return not self._steps

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take ``event`` in and say what to do about it.

        ``StepFinished`` and ``StepCompleted`` of a step come after everything else that concerns it. Raises
        ``InvalidTransition``, and changes nothing, for an event that cannot follow what happened before.
        """
        if isinstance(event, TaskCompleted):
            return self._completed(event, now)
        if isinstance(event, TaskIssued):
            return self._issued(event, now)
        if isinstance(event, StepSubmitted):
            return self._submitted(event, now)
        if isinstance(event, TaskFailed):
            return self._failed(event, now)
        if isinstance(event, TaskDropped):
            return self._dropped(event, now)
        if isinstance(event, GateOpened):
            return self._gate_opened(event, now)
        return self._cancelled(event, now)

    def take_record(self, step: int) -> StepRecord:
        """The record of a completed step, which the scheduler then forgets."""
        found = self._steps.get(step)
        if found is None or not found.finished or found.held:
            raise InvalidTransition(f"step {step} is not completed")
        del self._steps[step]
        return StepRecord(step, found.graph, found.journal, found.outcome)

    # Steps

    def _submitted(self, event: StepSubmitted, now: float) -> list[Command]:
        if event.step <= self._last_step:
            raise InvalidTransition(f"step {event.step} was submitted before, or after a later one")
        self._last_step = event.step
        graph = event.graph
        lanes = [self._lanes.setdefault(lane, _Lane(lane)) for lane in graph.lanes]
        step = _Step(
            number=event.step,
            graph=graph,
            lanes=[lanes[lane] for lane in graph.lane_of],
            unmet=[len(before) for before in graph.dependencies],
            states=[_WAITING] * len(graph.tasks),
            to_issue=len(graph.tasks),
            closed_gates=set(range(len(graph.gates))),
        )
        self._steps[event.step] = step
        step.journal.append((now, event))
        for gated in graph.gates:
            step.unmet[gated] += 1
        for task, unmet in enumerate(step.unmet):
            if not unmet:
                self._make_ready(step, task)
        return self._decide(step, lanes, now)

    def _gate_opened(self, event: GateOpened, now: float) -> list[Command]:
        step = self._steps.get(event.step)
        if step is None or event.microbatch not in step.closed_gates:
            raise InvalidTransition(f"{event} came for a gate that is not there, or is open")
        step.closed_gates.remove(event.microbatch)
        step.journal.append((now, event))
        gated = step.graph.gates[event.microbatch]
        step.unmet[gated] -= 1
        if step.unmet[gated] or step.outcome is not Outcome.OK:
            return []
        return self._decide(step, [self._make_ready(step, gated)], now)

    def _cancelled(self, event: StepCancelled, now: float) -> list[Command]:
        step = self._steps.get(event.step)
        if step is None:
            raise InvalidTransition(f"step {event.step} is not under way")
        step.journal.append((now, event))
        if step.finished or step.outcome is not Outcome.OK:
            return []
        return self._abort(step, Outcome.CANCELLED, now)

    def _abort(self, step: _Step, outcome: Outcome, now: float) -> list[Command]:
        step.outcome = outcome
        for lane in {id(lane): lane for lane in step.lanes}.values():
            lane.ready = [entry for entry in lane.ready if entry[2] is not step]
            lane.ready.sort()
        step.journal.append((now, Abort(step.number)))
        return [Abort(step.number), *self._decide(step, self._lanes.values(), now)]

    # Tasks

    def _find(self, event: TaskIssued | TaskCompleted | TaskFailed | TaskDropped, *allowed: TaskState) -> _Step:
        step = self._steps.get(event.step)
        if step is None:
            raise InvalidTransition(f"{event} came for a step that is not under way")
        if not 0 <= event.task < len(step.states):
            raise InvalidTransition(f"{event} came for a task that step {event.step} does not have")
        state = step.states[event.task]
        if state not in allowed:
            name = step.graph.tasks[event.task].id
            raise InvalidTransition(f"{event} came while {name} is {state.name.lower()}", _story(step, event.task))
        return step

    def _issued(self, event: TaskIssued, now: float) -> list[Command]:
        step = self._find(event, _DISPATCHED)
        step.journal.append((now, event))
        return self._decide(step, self._release(step, event.task), now)

    def _completed(self, event: TaskCompleted, now: float) -> list[Command]:
        step = self._find(event, _DISPATCHED, _ISSUED)
        step.journal.append((now, event))
        task = event.task
        touched = self._release(step, task) if step.states[task] is _DISPATCHED else []
        step.states[task] = _COMPLETED
        touched.append(self._give_back(step, task))
        return self._decide(step, touched, now)

    def _failed(self, event: TaskFailed, now: float) -> list[Command]:
        step = self._find(event, _DISPATCHED, _ISSUED)
        step.journal.append((now, event))
        step.states[event.task] = _FAILED
        lane = self._give_back(step, event.task)
        if step.error is None:
            step.failed_task, step.error = event.task, event.error
        if step.outcome is not Outcome.OK:
            return self._decide(step, [lane], now)
        return self._abort(step, Outcome.FAILED, now)

    def _dropped(self, event: TaskDropped, now: float) -> list[Command]:
        step = self._find(event, _DISPATCHED)
        if step.outcome is Outcome.OK:
            message = f"{event} came although step {event.step} is not aborted"
            raise InvalidTransition(message, _story(step, event.task))
        step.journal.append((now, event))
        step.states[event.task] = _DROPPED
        return self._decide(step, [self._give_back(step, event.task)], now)

    def _release(self, step: _Step, task: int) -> list[_Lane]:
        """Issue ``task``: its dependents on other devices need not wait for it. Returns their lanes."""
        step.states[task] = _ISSUED
        step.to_issue -= 1
        if step.outcome is not Outcome.OK:
            return []
        unmet = step.unmet
        touched = []
        for dependent in step.graph.remote_dependents[task]:
            unmet[dependent] -= 1
            if not unmet[dependent]:
                touched.append(self._make_ready(step, dependent))
        return touched

    def _make_ready(self, step: _Step, task: int) -> _Lane:
        step.states[task] = _READY
        lane = step.lanes[task]
        heappush(lane.ready, (step.number, task, step))
        return lane

    def _give_back(self, step: _Step, task: int) -> _Lane:
        lane = step.lanes[task]
        lane.in_flight -= 1
        step.held -= 1
        return lane

    # Decisions

    def _decide(self, step: _Step, touched: Iterable[_Lane], now: float) -> list[Command]:
        """Dispatch what ``touched`` lanes have ready, then see whether ``step`` is at its end."""
        commands: list[Command] = []
        pending = list(touched)
        while pending:
            lane = pending.pop()
            while lane.ready and lane.in_flight < self._cap:
                _, task, owner = heappop(lane.ready)
                pending += self._dispatch(owner, task, lane)
                command = Dispatch(owner.number, task)
                owner.journal.append((now, command))
                commands.append(command)
        if not step.to_issue or (step.outcome is not Outcome.OK and not step.held):
            self._end(step, commands, now)
        return commands

    def _dispatch(self, step: _Step, task: int, lane: _Lane) -> list[_Lane]:
        """Hand ``task`` over: its dependents on the same device queue up behind it. Returns other lanes of theirs."""
        step.states[task] = _DISPATCHED
        step.held += 1
        lane.in_flight += 1
        unmet = step.unmet
        others = []
        for dependent in step.graph.local_dependents[task]:
            unmet[dependent] -= 1
            if not unmet[dependent]:
                other = self._make_ready(step, dependent)
                if other is not lane:
                    others.append(other)
        return others

    def _end(self, step: _Step, commands: list[Command], now: float) -> None:
        ends: list[Command] = []
        if not step.finished:
            step.finished = True
            ends.append(StepFinished(step.number, step.outcome, step.failed_task, step.error))
        if not step.held:
            ends.append(StepCompleted(step.number, step.outcome, step.failed_task, step.error))
        step.journal.extend((now, end) for end in ends)
        commands.extend(ends)

    # Invariants

    def check(self) -> None:
        """Assert what must hold between two events; tests call it after each and at teardown."""
        held: dict[int, int] = {}
        for step in self._steps.values():
            counts = [step.states.count(state) for state in TaskState]
            assert step.held == counts[_DISPATCHED] + counts[_ISSUED], "held tasks are miscounted"
            for task, (state, lane) in enumerate(zip(step.states, step.lanes, strict=True)):
                if state in (_DISPATCHED, _ISSUED):
                    held[id(lane)] = held.get(id(lane), 0) + 1
                if state is _WAITING and step.outcome is Outcome.OK:
                    assert step.unmet[task] > 0, f"{step.graph.tasks[task]} waits for nothing"
        for lane in self._lanes.values():
            assert lane.in_flight == held.get(id(lane), 0), f"{lane.lane} is miscounted"
            assert lane.in_flight <= self._cap, f"{lane.lane} holds too many tasks"
            assert not lane.ready or lane.in_flight == self._cap, f"{lane.lane} has work and room, but stands still"


def _story(step: _Step, task: int) -> list[tuple[float, Event | Command]]:
    """What happened to a task, oldest first."""
    return [(at, event) for at, event in step.journal if getattr(event, "task", None) == task]
