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

The steps of a ruled schedule choose as late as they can: a task is ready when its dependencies are *completed*, its
device holds ``ahead`` tasks at most, and among the ready ones the lowest rank comes first that ``core/admission.py``
lets in. They choose in ``settle``, once everything that has happened is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from asyncpipe.core.admission import Admission
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
from asyncpipe.core.state import LaneState, StepState, TaskState, check_invariants
from asyncpipe.core.task import WHOLE_STEP, Lane, Queue
from asyncpipe.errors import InvalidTransition, OptionError, ScheduleError

__all__ = ["SchedulerState", "TaskState"]


# Module constants: an enum attribute costs a lookup in the hottest loop.
_WAITING, _READY, _DISPATCHED, _ISSUED, _COMPLETED, _FAILED, _DROPPED = TaskState


class SchedulerState:
    """Decides for any number of steps at a time on shared lanes. Mutated only by ``handle``; not thread-safe."""

    def __init__(self, *, in_flight: int = 16) -> None:
        """``in_flight`` bounds the tasks of a lane that its device holds: how far the host runs ahead."""
        if in_flight < 1:
            raise OptionError(f"in_flight must be a positive integer, got {in_flight}")
        self._cap = in_flight
        self._steps: dict[int, StepState] = {}
        self._lanes: dict[Lane, LaneState] = {}
        self._unsettled: dict[int, LaneState] = {}
        """Compute lanes where a ruled step has something to choose."""
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

    def settle(self, now: float) -> list[Command]:
        """Let ruled steps choose; call it when every event that is known has been handled."""
        commands: list[Command] = []
        if not self._unsettled:
            return commands
        while self._unsettled:
            _, lane = self._unsettled.popitem()
            self._choose(lane, commands, now)
        for step in [step for step in self._steps.values() if step.is_stuck]:
            assert step.admission is not None
            task = min(step.admission.refused())
            commands += self._fail(step, task, _refused(step, task, "although nothing else can run"), now)
        return commands

    def wake_at(self, now: float) -> float | None:
        return None

    def expected(self, step: int, task: int) -> float | None:
        return None

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
        lanes = [self._lanes.setdefault(lane, LaneState(lane)) for lane in graph.lanes]
        step = StepState(
            number=event.step,
            graph=graph,
            lanes=[lanes[lane] for lane in graph.lane_of],
            unmet=[len(before) for before in graph.dependencies],
            states=[_WAITING] * len(graph.tasks),
            to_issue=len(graph.tasks),
            closed_gates=set(range(len(graph.gates))),
            admission=None if graph.rule is None else Admission(graph),
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

    def _fail(self, step: StepState, task: int, error: BaseException, now: float) -> list[Command]:
        """End the step because ``task`` failed, or cannot be decided about."""
        step.failed_task, step.error = task, error
        return self._abort(step, Outcome.FAILED, now)

    def _abort(self, step: StepState, outcome: Outcome, now: float) -> list[Command]:
        step.outcome = outcome
        for lane in {id(lane): lane for lane in step.lanes}.values():
            lane.ready = [entry for entry in lane.ready if entry[2] is not step]
            lane.ready.sort()
        step.journal.append((now, Abort(step.number)))
        return [Abort(step.number), *self._decide(step, self._lanes.values(), now)]

    # Tasks

    def _find(self, event: TaskIssued | TaskCompleted | TaskFailed | TaskDropped, *allowed: TaskState) -> StepState:
        step = self._steps.get(event.step)
        if step is None:
            raise InvalidTransition(f"{event} came for a step that is not under way")
        if not 0 <= event.task < len(step.states):
            raise InvalidTransition(f"{event} came for a task that step {event.step} does not have")
        state = step.states[event.task]
        if state not in allowed:
            name = step.graph.tasks[event.task].id
            raise InvalidTransition(f"{event} came while {name} is {state.name.lower()}", step.story(event.task))
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
        if step.admission is not None and step.outcome is Outcome.OK:
            touched += self._completed_ruled(step, step.admission, task)
        return self._decide(step, touched, now)

    def _completed_ruled(self, step: StepState, admission: Admission, task: int) -> list[LaneState]:
        """All dependents of a ruled step's task wait for its completion, and its micro-batch may leave the device."""
        graph = step.graph
        touched = []
        for dependent in (*graph.local_dependents[task], *graph.remote_dependents[task]):
            step.unmet[dependent] -= 1
            if not step.unmet[dependent]:
                touched.append(self._make_ready(step, dependent))
        if _is_admitted(step, task):
            touched += [self._make_ready(step, other) for other in admission.leave(task)]
        return touched

    def _failed(self, event: TaskFailed, now: float) -> list[Command]:
        step = self._find(event, _DISPATCHED, _ISSUED)
        step.journal.append((now, event))
        step.states[event.task] = _FAILED
        lane = self._give_back(step, event.task)
        if step.outcome is Outcome.OK:
            return self._fail(step, event.task, event.error, now)
        if step.error is None:
            step.failed_task, step.error = event.task, event.error
        return self._decide(step, [lane], now)

    def _dropped(self, event: TaskDropped, now: float) -> list[Command]:
        step = self._find(event, _DISPATCHED)
        if step.outcome is Outcome.OK:
            message = f"{event} came although step {event.step} is not aborted"
            raise InvalidTransition(message, step.story(event.task))
        step.journal.append((now, event))
        step.states[event.task] = _DROPPED
        return self._decide(step, [self._give_back(step, event.task)], now)

    def _release(self, step: StepState, task: int) -> list[LaneState]:
        """Issue ``task``: its dependents on other devices need not wait for it. Returns their lanes."""
        step.states[task] = _ISSUED
        step.to_issue -= 1
        if step.outcome is not Outcome.OK or step.admission is not None:
            return []
        unmet = step.unmet
        touched = []
        for dependent in step.graph.remote_dependents[task]:
            unmet[dependent] -= 1
            if not unmet[dependent]:
                touched.append(self._make_ready(step, dependent))
        return touched

    def _make_ready(self, step: StepState, task: int) -> LaneState:
        step.states[task] = _READY
        lane = step.lanes[task]
        rule = step.graph.rule
        heappush(lane.ready, (step.number, task if rule is None else rule.ranks[task], step))
        return lane

    def _give_back(self, step: StepState, task: int) -> LaneState:
        lane = step.lanes[task]
        lane.in_flight -= 1
        step.held -= 1
        return lane

    # Decisions

    def _decide(self, step: StepState, touched: Iterable[LaneState], now: float) -> list[Command]:
        """Dispatch what ``touched`` lanes have ready, then see whether ``step`` is at its end."""
        commands: list[Command] = []
        pending = list(touched)
        while pending:
            pending += self._dispatch_ready(pending.pop(), commands, now)
        if not step.to_issue or (step.outcome is not Outcome.OK and not step.held):
            self._end(step, commands, now)
        return commands

    def _dispatch_ready(self, lane: LaneState, commands: list[Command], now: float) -> list[LaneState]:
        """Dispatch what the lane has ready and room for. Returns other lanes that have more to do by that."""
        others: list[LaneState] = []
        while lane.ready and lane.in_flight < self._cap:
            _, rank, owner = lane.ready[0]
            if owner.admission is not None and lane.lane.queue is Queue.COMPUTE:
                self._unsettled[id(lane)] = lane
                break
            heappop(lane.ready)
            task = rank if owner.graph.rule is None else owner.graph.rule.by_rank[rank]
            others += self._dispatch(owner, task, lane, commands, now)
        return others

    def _choose(self, lane: LaneState, commands: list[Command], now: float) -> None:
        """Dispatch the tasks of ruled steps that come first among those that the lane has ready and may run."""
        while lane.ready and lane.in_flight < self._cap:
            _, rank, owner = lane.ready[0]
            rule = owner.graph.rule
            if rule is None:
                commands += self._decide(owner, [lane], now)
                return
            if lane.in_flight >= rule.ahead:
                return
            heappop(lane.ready)
            task = rule.by_rank[rank]
            try:
                freed = self._enter(owner, task)
            except Exception as error:  # noqa: BLE001 - anybody's code: it ends the step, not the scheduler
                commands += self._fail(owner, task, _refused(owner, task, f"but raises {error!r}", error), now)
                continue
            if freed is None:
                continue
            for other in freed:
                self._make_ready(owner, other)
            self._dispatch(owner, task, lane, commands, now)

    @staticmethod
    def _enter(step: StepState, task: int) -> list[int] | None:
        """As ``Admission.enter``; what belongs to no micro-batch needs no admission."""
        assert step.admission is not None
        return step.admission.enter(task) if _is_admitted(step, task) else []

    def _dispatch(
        self, step: StepState, task: int, lane: LaneState, commands: list[Command], now: float
    ) -> list[LaneState]:
        """Hand ``task`` over: its dependents on the same device queue up behind it. Returns other lanes of theirs."""
        command = Dispatch(step.number, task)
        step.journal.append((now, command))
        commands.append(command)
        step.states[task] = _DISPATCHED
        step.held += 1
        lane.in_flight += 1
        others: list[LaneState] = []
        if step.admission is not None:
            return others
        unmet = step.unmet
        for dependent in step.graph.local_dependents[task]:
            unmet[dependent] -= 1
            if not unmet[dependent]:
                other = self._make_ready(step, dependent)
                if other is not lane:
                    others.append(other)
        return others

    def _end(self, step: StepState, commands: list[Command], now: float) -> None:
        ends: list[Command] = []
        if not step.finished:
            step.finished = True
            ends.append(StepFinished(step.number, step.outcome, step.failed_task, step.error))
        if not step.held:
            ends.append(StepCompleted(step.number, step.outcome, step.failed_task, step.error))
        step.journal.extend((now, end) for end in ends)
        commands.extend(ends)

    def check(self) -> None:
        """Assert what must hold between two events; tests call it after each and at teardown."""
        check_invariants(self._steps.values(), self._lanes.values(), self._cap)


def _is_admitted(step: StepState, task: int) -> bool:
    """Whether ``task`` counts for the micro-batches that its device holds: compute of a micro-batch."""
    return step.lanes[task].lane.queue is Queue.COMPUTE and step.graph.tasks[task].microbatch != WHOLE_STEP


def _refused(step: StepState, task: int, how: str, cause: Exception | None = None) -> ScheduleError:
    """Why a rule cannot go on at ``task``."""
    found = step.graph.tasks[task]
    error = ScheduleError(
        f"schedule {step.graph.schedule!r}, device {found.lane.device}: admit does not let {found.id} in, {how}; it "
        "must answer the same every time"
    )
    error.__cause__ = cause
    return error
