"""How a driver shares its devices with other processes: an arbiter says when each task may begin.

::

    Driver ──▶ happened ──▶ ArbiterSeat ── StepRequest, events ──▶ an Arbiter, elsewhere (core/engine/arbiter.py)
    Driver ◀── hand_over ──                ◀── TurnsGiven, StepOver

The driver's own scheduler then notes what happens, and decides nothing (``StepSubmitted.parts``). While nobody else
uses the devices, steps run as on devices of one's own. An arbiter that is gone costs no step: an own one takes its
place, for the steps that it had.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from asyncpipe.core.engine.arbiter import MOST_GRAPHS, Answer, Arbiter, Said, Sharing, StepRequest, TurnsGiven
from asyncpipe.core.engine.events import (
    Dispatch,
    Event,
    GateOpened,
    ProgramEnded,
    StepCancelled,
    TaskCompleted,
    TaskDropped,
    TaskFailed,
    TaskIssued,
)
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.runtime.execution import Execution
from asyncpipe.runtime.step_abort import PostEvent

__all__ = ["ArbiterSeat", "ServedArbiter"]

_ENDS = (TaskCompleted, TaskFailed, TaskDropped)
_TOLD = (*_ENDS, TaskIssued, GateOpened, StepCancelled)


class ServedArbiter:
    """An arbiter on the loop that uses it, with a clock and an alarm. A party is who is called with its answers."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._arbiter = Arbiter[Callable[[Sequence[Answer]], object]]()
        self._clock = clock
        self._alarm: asyncio.TimerHandle | None = None

    def join(self, answer: Callable[[Sequence[Answer]], object], devices: Iterable[str]) -> None:
        """A party is there."""
        self._arbiter.join(answer, devices)
        self._decide()

    def leave(self, answer: Callable[[Sequence[Answer]], object]) -> None:
        """A party is gone. May be called again."""
        self._arbiter.leave(answer, self._clock())
        self._decide()

    def hear(self, answer: Callable[[Sequence[Answer]], object], said: Sequence[Said]) -> None:
        """Take in what a party says. Raises as ``Arbiter.handle``."""
        self._arbiter.handle(answer, said, self._clock())
        self._decide()

    def _decide(self) -> None:
        now = self._clock()
        told = self._arbiter.decide(now)
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if (at := self._arbiter.wake_at(now)) is not None:
            self._alarm = asyncio.get_running_loop().call_later(max(0.0, at - now), self._decide)
        for answer, answers in told.items():
            answer(answers)


@dataclass(eq=False)
class _SeatedStep:
    execution: Execution
    given: set[int] = field(default_factory=set)
    """The tasks that had their turn."""
    ended: dict[int, Event] = field(default_factory=dict)
    """What became of them."""
    others: list[Event] = field(default_factory=list)
    """What else has happened to it."""
    is_over: bool = False
    """Whether it is for the arbiter."""


class ArbiterSeat:
    """The place of a driver at an arbiter. On the driver's loop."""

    def __init__(
        self,
        post: PostEvent,
        hand_over: Callable[[Sequence[Dispatch]], object],
        say: Callable[[Sequence[Said]], object] = lambda said: None,
    ) -> None:
        """``post`` and ``hand_over`` are the driver's; ``say`` brings the arbiter what it is told, if there is one."""
        self.is_shared = False
        """Whether another process uses one of the devices."""
        self._post = post
        self._hand_over = hand_over
        self._say = say
        self._said: list[Said] = []
        self._steps: dict[int, _SeatedStep] = {}
        self._graphs: dict[TaskGraph, int] = {}
        """Those that the arbiter knows, with their numbers."""

    def begin(self, execution: Execution) -> None:
        """Request a step."""
        step = self._steps[execution.number] = _SeatedStep(execution)
        if execution.abort.is_requested:
            execution.abort.confirm()  # What ends it is in the driver's inbox now.
            step.is_over = True
            self._end(step)
        else:
            self._request(step)
            self.flush()

    def happened(self, event: Event) -> None:
        """The driver has handled an event of a step of this seat."""
        if not isinstance(event, _TOLD) or (step := self._steps.get(event.step)) is None:
            return
        if isinstance(event, TaskFailed):  # Its class may be known here alone, and nobody there asks.
            event = TaskFailed(event.step, event.task, RuntimeError())
        if isinstance(event, _ENDS):
            step.ended[event.task] = event
        elif not isinstance(event, TaskIssued):
            step.others.append(event)
        self._said.append(event)
        if step.is_over:
            self._end(step)

    def flush(self) -> None:
        """Tell the arbiter what has happened."""
        if said := self._said:
            self._said = []
            self._say(said)

    def answered(self, answers: Sequence[Answer]) -> None:
        """The arbiter has decided something."""
        given: list[Dispatch] = []
        for answer in answers:
            if isinstance(answer, Sharing):
                self.is_shared = answer.is_shared
            elif (step := self._steps.get(answer.step)) is None:
                continue
            elif isinstance(answer, TurnsGiven):
                step.given.update(answer.tasks)
                given += [Dispatch(answer.step, task) for task in answer.tasks]
            else:
                step.is_over, step.execution.notes.taken = True, answer.taken
                if answer.failed is not None and not step.execution.abort.is_requested:
                    failed = TaskFailed(answer.step, *answer.failed)
                    step.given.add(failed.task)
                    step.execution.abort.request(self._post, failed)
                self._end(step)
        if given:
            self._hand_over(given)

    def lost(self) -> None:
        """The arbiter is gone: an own one takes its place."""
        self.is_shared, self._said, self._graphs = False, [], {}
        own = ServedArbiter()
        self._say = partial(own.hear, self.answered)
        own.join(self.answered, ())
        for step in list(self._steps.values()):
            if step.execution.abort.is_requested:
                step.is_over = True  # Nothing of it is to begin any more.
                self._end(step)
            else:
                self._request(step)
                self._said += step.others
        self.flush()

    def _request(self, step: _SeatedStep) -> None:
        execution, graph = step.execution, None
        if execution.graph not in self._graphs:
            if len(self._graphs) == MOST_GRAPHS:
                self._graphs.clear()
            graph = execution.graph
            self._graphs[graph] = len(self._graphs)
        share, after = execution.tenant.share, execution.follows
        number = self._graphs[execution.graph]
        request = StepRequest(execution.number, number, graph, share, after, dict(step.ended), frozenset(step.given))
        self._said.append(request)

    def _end(self, step: _SeatedStep) -> None:
        """The step is over for the driver, too, if nothing of it runs here."""
        number = step.execution.number
        if self._steps.get(number) is step and step.given == step.ended.keys():
            del self._steps[number]
            left = set(range(len(step.execution.graph.tasks))) - step.given
            self._post(ProgramEnded(number, tuple(sorted(left))))
