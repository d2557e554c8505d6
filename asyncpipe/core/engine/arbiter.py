"""Who is next on devices that several processes use: one scheduler for the steps of all of them.

Each process (a *party*) has executors, stages and a scheduler of its own, and asks here whose task is next where it
shares a device. What is decided is what one ``SchedulerState`` decides for jobs on threads: weights, background jobs
and their lookahead are the same code::

    party a ── StepRequest, what became of tasks ──▶ ┌─────────┐ ── TurnsGiven, StepOver ──▶ party a
    party b ── StepRequest, what became of tasks ──▶ │ Arbiter │ ── TurnsGiven, StepOver ──▶ party b
                                                     └─────────┘ ── Sharing ──▶ both

A device runs one task at a time, as a thread does, whoever has it: a party gets its turn when the task of another one
has ended, or is queued on an accelerator. Tasks of one party follow each other without an answer from here.

A party whose device nobody else uses asks for nothing (``Sharing``). One that is gone leaves nothing behind. If the
arbiter is gone, a party goes on with another one, which it tells what has happened (``StepRequest``).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from asyncpipe.core.engine.events import (
    Abort,
    Command,
    Dispatch,
    Event,
    StepCancelled,
    StepCompleted,
    StepSubmitted,
    TaskCompleted,
    TaskDropped,
    TaskFailed,
    TaskIssued,
)
from asyncpipe.core.engine.lane_use import Taken
from asyncpipe.core.engine.scheduler import SchedulerState
from asyncpipe.core.graph.task import Lane
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.policies.share import Share
from asyncpipe.errors import InvalidTransition, ScheduleError

__all__ = ["MOST_GRAPHS", "Answer", "Arbiter", "Said", "Sharing", "StepOver", "StepRequest", "TurnsGiven"]

MOST_GRAPHS = 32
"""Of a party. When it numbers another one 0, the others are forgotten."""

_TASK_EVENTS = (TaskCompleted, TaskIssued, TaskFailed, TaskDropped)


class StepRequest(NamedTuple):
    """A party wants to run a step."""

    step: int
    """Its own number for it. What it says of the step later has this number as well."""
    number: int
    """Of the graph."""
    graph: TaskGraph | None
    """``None`` if it was sent before."""
    share: Share
    after: int | None = None
    """The step that this one follows on every device."""
    ended: Mapping[int, Event] = {}
    """What became of tasks before, if another arbiter has had the step."""
    given: Collection[int] = ()
    """The tasks that had their turn there."""


class TurnsGiven(NamedTuple):
    """These tasks of a step may begin, in this order on each device."""

    step: int
    tasks: list[int]


class StepOver(NamedTuple):
    """Nothing of a step is given a turn any more, and all that was has ended."""

    step: int
    taken: dict[Lane, Taken]
    """By lane, how long others had it."""
    failed: tuple[int, BaseException] | None = None
    """What has ended it here, if its rule did: at which task, and the error."""


class Sharing(NamedTuple):
    """Whether another party uses one of the party's devices."""

    is_shared: bool


_Key = TypeVar("_Key")
Said: TypeAlias = StepRequest | Event
Answer: TypeAlias = TurnsGiven | StepOver | Sharing


@dataclass(eq=False)
class _Party:
    """A process, and what it is to be told."""

    devices: frozenset[str]
    answers: list[Answer] = field(default_factory=list)
    graphs: dict[int, TaskGraph] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    """By its own number of a step, that of the arbiter."""
    is_shared: bool = False
    job: str = ""
    """What it calls itself in its steps."""


@dataclass(eq=False)
class _RequestedStep:
    party: _Party
    own: int
    """The party's number for it."""
    graph: TaskGraph
    ended: dict[int, Event]
    """What became of tasks whose turn has not come here."""
    given: Collection[int]


@dataclass(eq=False)
class _DeviceTurn:
    """A device: who has it, and who is next."""

    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    """(step, task) in the order in which they were dispatched."""
    begun: set[tuple[int, int]] = field(default_factory=set)
    """Those that were given, all of one party."""


class Arbiter(Generic[_Key]):
    """Mutated by ``join``, ``leave``, ``handle`` and ``decide``. It has no clock. Parties are told apart by any key."""

    def __init__(self) -> None:
        self._scheduler = SchedulerState()
        self._parties: dict[_Key, _Party] = {}
        self._steps: dict[int, _RequestedStep] = {}
        """By their numbers here."""
        self._next = 0
        self._turns: defaultdict[str, _DeviceTurn] = defaultdict(_DeviceTurn)
        """By device."""

    def join(self, key: _Key, devices: Iterable[str]) -> None:
        """A party is there, which uses these devices."""
        self._parties[key] = _Party(frozenset(devices))
        self._note_sharing()

    def leave(self, key: _Key, now: float) -> None:
        """A party is gone, with all that it ran. May be called again."""
        if (party := self._parties.pop(key, None)) is None:
            return
        for number, step in [each for each in self._steps.items() if each[1].party is party]:
            if number in self._steps:  # It may have ended with the one before.
                self._handle(StepCancelled(number), now)
            for task in range(len(step.graph.tasks)):
                if self._scheduler.holds(number, task):
                    self._happened(number, TaskFailed(number, task, RuntimeError("its process is gone")), now)
        self._scheduler.forget(party.job)
        self._note_sharing()

    def _note_sharing(self) -> None:
        parties = self._parties.values()
        for party in parties:
            is_shared = any(other is not party and other.devices & party.devices for other in parties)
            if is_shared != party.is_shared:
                party.is_shared = is_shared
                party.answers.append(Sharing(is_shared))

    def handle(self, key: _Key, said: Iterable[Said], now: float) -> None:
        """Take in what a party says. Raises ``InvalidTransition`` for what cannot follow what it has said before."""
        party = self._parties[key]
        for each in said:
            if isinstance(each, StepRequest):
                self._submit(party, each, now)
            elif (number := party.numbers.get(each.step)) is not None:
                self._happened(number, _renumbered(each, number), now)

    def decide(self, now: float) -> dict[_Key, Sequence[Answer]]:
        """What to tell each party, when all that is known has been handled, and at ``wake_at``."""
        while commands := self._scheduler.choose(now):
            self._execute(commands, now)
        for turn in self._turns.values():
            self._give(turn)
        told = {key: party.answers for key, party in self._parties.items() if party.answers}
        for key in told:
            self._parties[key].answers = []
        return {**told}

    def wake_at(self, now: float) -> float | None:
        """When to call ``decide`` although nothing has happened."""
        return self._scheduler.wake_at(now)

    def _submit(self, party: _Party, request: StepRequest, now: float) -> None:
        if request.graph is not None:
            if not request.number:
                party.graphs.clear()
            party.graphs[request.number] = request.graph
        if request.number not in party.graphs or request.step in party.numbers:
            raise InvalidTransition(f"step {request.step} has no graph, or was requested before")
        graph, number, party.job = party.graphs[request.number], self._next, request.share.job
        self._next += 1
        party.numbers[request.step] = number
        self._steps[number] = _RequestedStep(party, request.step, graph, dict(request.ended), request.given)
        after = None if request.after is None else party.numbers.get(request.after)
        self._handle(StepSubmitted(number, graph, request.share, after=after), now)

    def _happened(self, number: int, event: Event, now: float) -> None:
        if isinstance(event, _TASK_EVENTS):
            step, task = self._steps[number], event.task
            if not self._scheduler.holds(number, task):
                step.ended[task] = event
                return
            self._turns[step.graph.tasks[task].lane.device].begun.discard((number, task))
        self._handle(event, now)

    def _handle(self, event: Event, now: float) -> None:
        self._execute(self._scheduler.handle(event, now), now)

    def _execute(self, commands: Iterable[Command], now: float) -> None:
        pending = deque(commands)  # In this order: a device runs tasks in the order in which they were dispatched.
        while pending:
            command, known = pending.popleft(), list[Event]()
            if isinstance(command, Dispatch):
                known = self._dispatched(*command)
            elif isinstance(command, Abort):
                for turn in self._turns.values():
                    known += [TaskDropped(*each) for each in turn.waiting if each[0] == command.step]
                    turn.waiting = deque(each for each in turn.waiting if each[0] != command.step)
            elif isinstance(command, StepCompleted):
                step, taken = self._steps.pop(command.step), self._scheduler.remove(command.step).taken
                del step.party.numbers[step.own]
                failed = None
                if command.failed_task is not None and isinstance(command.error, ScheduleError):
                    failed = command.failed_task, ScheduleError(str(command.error))
                step.party.answers.append(StepOver(step.own, taken, failed))
            for event in known:
                pending.extend(self._scheduler.handle(event, now))

    def _dispatched(self, number: int, task: int) -> list[Event]:
        """Have a task wait for its turn; what became of it, if it had that before."""
        step = self._steps[number]
        turn = self._turns[step.graph.tasks[task].lane.device]
        if (event := step.ended.pop(task, None)) is not None:
            return [_renumbered(event, number)]
        if task in step.given:
            turn.begun.add((number, task))
        else:
            turn.waiting.append((number, task))
        return []

    def _give(self, turn: _DeviceTurn) -> None:
        """Give turns to those who wait, as long as nobody else has the device."""
        while turn.waiting:
            number, task = turn.waiting[0]
            step = self._steps[number]
            if any(self._steps[other].party is not step.party for other, _ in turn.begun):
                return
            turn.begun.add(turn.waiting.popleft())
            answers = step.party.answers
            if answers and isinstance(last := answers[-1], TurnsGiven) and last.step == step.own:
                last.tasks.append(task)
            else:
                answers.append(TurnsGiven(step.own, [task]))


def _renumbered(event: Event, step: int) -> Event:
    return event._replace(step=step) if isinstance(event, TaskCompleted) else replace(event, step=step)
