"""The scheduler: a state machine that takes events in and answers with commands. It has no clock, thread or device.

States of a task. Dependents on other devices are released when the task is *issued*. Dependents on the same device,
which runs tasks in the order in which it gets them, are released when it is *dispatched*::

    waiting ──▶ ready ──▶ dispatched ──▶ issued ──▶ completed
                              │  └──────────┼──────▶ completed     (a CPU does both at once)
                              ├─────────────┴──────▶ failed
                              └────────────────────▶ dropped       (only while the step drains)

States of a step. It drains when a task fails or the step is cancelled: no more of its tasks are dispatched, and those
that devices still hold come back completed, failed or dropped::

    running ──▶ finished ──▶ completed
       └──────▶ draining ──▶ completed

Guarantees, whatever the policies: a task is dispatched after every dependency on another device was issued and every
dependency on its own device was dispatched (or all were completed, in a ruled step); at most ``in_flight`` tasks of a
lane, with fair shares of each job on it, are dispatched and not completed, over all steps; a rule's ``admit`` is
respected (``microbatch_admission.py``); an event that cannot follow what happened raises ``InvalidTransition`` and
changes nothing.

A step is handed over by *programs* if its devices take them, its graph has an order, and all its lanes are in order
(below). Each device then has all its tasks and releases what waits for them. Here every event and transition is the
same; dispatches are noted in the journal, and the cap is kept by the devices.

Otherwise, which ready task of a lane comes next is decided by the lane's policy (``policies/policy.py``). Two are
built in, and a lane gets the simplest that is enough:

- One pipeline, whose graph has an order: ``FirstComeFirstServed``. There is nothing to decide; ``handle`` answers at
  once.
- One pipeline, whose schedule decides by a rule: the same on compute lanes, where it chooses as late as possible: in
  ``choose``, which is called when all events that are known have been handled.
- Jobs with names, or in the background: ``FairShare``, which also decides in ``choose``.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncpipe.core.engine.dispatcher import Dispatcher
from asyncpipe.core.engine.events import (
    Abort,
    Command,
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
from asyncpipe.core.engine.microbatch_admission import StepAdmissions
from asyncpipe.core.engine.steps import LaneState, StepState, follow
from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.policies.fair_share import FairShare, SharedLanes
from asyncpipe.core.policies.first_come import FirstComeFirstServed
from asyncpipe.core.policies.jobs import JobAccount, Jobs
from asyncpipe.core.policies.policy import MakePolicy, TaskState
from asyncpipe.errors import InvalidTransition, OptionError

__all__ = ["SchedulerState", "TaskState"]


# Module constants: an enum attribute costs a lookup in the hottest loop.
_WAITING, _READY, _DISPATCHED, _ISSUED, _COMPLETED, _FAILED, _DROPPED = TaskState
_NOT_BEGUN = (_WAITING, _READY, _DISPATCHED)
_NOT_ENDED = frozenset(_NOT_BEGUN)
_OK = Outcome.OK


class SchedulerState:
    """Decides for any number of steps at a time. Mutated by ``handle`` and ``choose`` alone; not thread-safe."""

    def __init__(self, *, in_flight: int = 16, policy: MakePolicy | None = None) -> None:
        """``in_flight`` bounds the tasks of a lane that its device holds (see above): how far the host runs ahead.

        ``policy`` makes the policy of a lane; without it each lane has one of the built-in ones.
        """
        if in_flight < 1:
            raise OptionError(f"in_flight must be a positive integer, got {in_flight}")
        self._cap = in_flight
        self._make_policy = policy
        self._steps: dict[int, StepState] = {}
        self._jobs = Jobs()
        self._lanes: dict[Lane, LaneState] = {}
        self._shared = SharedLanes(in_flight)
        self._dispatcher = Dispatcher(in_flight, validate=policy is not None)
        # Bound once, for the hottest path.
        self._make_ready, self._dispatch_ready = self._dispatcher.make_ready, self._dispatcher.dispatch_ready
        self._last_step = -1

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
        if isinstance(event, ProgramEnded):
            return self._program_ended(event, now)
        return self._cancelled(event, now)

    def choose(self, now: float) -> list[Command]:
        """Let policies decide. Call it when all events that are known have been handled, and at ``wake_at``."""
        commands: list[Command] = []
        while self._dispatcher.choose(commands, now) and (broken := self._dispatcher.pop_broken()):
            for step, task, error in broken:
                if step.running:
                    commands += self._fail(step, task, error, now)
        return commands

    @property
    def is_stuck(self) -> bool:
        """Whether there are ready tasks although devices hold none: only a policy can have left them there."""
        steps = self._steps.values()
        return bool(steps) and not any(s.held for s in steps) and any(_READY in s.states for s in steps if s.running)

    def wake_at(self, now: float) -> float | None:
        """When to call ``choose`` although nothing has happened; ``None`` if that is of no use. Ask after ``choose``.

        A task may be held back for others that are expected, and they may not come.
        """
        return self._dispatcher.wake_at(now)

    def holds(self, step: int, task: int) -> bool:
        """Whether a device has the task: it was dispatched, and neither completed, failed nor was dropped."""
        under_way = self._steps.get(step)
        return under_way is not None and under_way.states[task] in (_DISPATCHED, _ISSUED)

    def ended(self, step: int) -> set[int]:
        """The tasks of a step under way that devices are done with, or have queued on an accelerator. On any thread."""
        under_way = self._steps.get(step)
        return (
            set() if under_way is None else {n for n, state in enumerate(under_way.states) if state not in _NOT_ENDED}
        )

    def waits_outside(self, step: int) -> bool:
        """Whether a gate of the step is closed."""
        under_way = self._steps.get(step)
        return under_way is not None and bool(under_way.closed_gates)

    def expected(self, step: int, task: int) -> float | None:
        """The seconds that such a task took the last times in its job; ``None`` if that is not known.

        It is known of steps with a named job, once one task of the kind at the stage is completed.
        """
        under_way = self._steps.get(step)
        return None if under_way is None else under_way.job.expected(under_way.graph.tasks[task])

    def forget(self, job: str) -> None:
        """Drop what is known of ``job``, now or when its last step is over, unless it submits another one till then.

        What was measured is kept from step to step, however long that takes; so call this when the job's last pipeline
        is closed. Forgetting a job that is unknown, or that comes back later, does no harm.
        """
        if (dropped := self._jobs.forget(job)) is not None:
            self._forget(dropped)

    def _forget(self, job: JobAccount) -> None:
        for lane in self._lanes.values():
            lane.policy.forget(job)

    def remove(self, step: int) -> StepState:
        """A completed step with its whole journal, which the scheduler then forgets.

        Raises ``InvalidTransition`` for one that is not completed.
        """
        under_way = self._steps.get(step)
        if under_way is None or not under_way.finished or not under_way.is_drained:
            raise InvalidTransition(f"step {step} is not completed")
        return self._steps.pop(step)

    # Steps

    def _submitted(self, event: StepSubmitted, now: float) -> list[Command]:
        if event.step <= self._last_step:
            raise InvalidTransition(f"step {event.step} was submitted before, or after a later one")
        graph = event.graph
        earlier = self._earlier(event)
        self._last_step = event.step
        job = self._jobs.begin(event.share)
        lanes = [self._lane(lane, graph, job) if not event.parts else LaneState(lane) for lane in graph.lanes]
        step = StepState(
            number=event.step,
            graph=graph,
            job=job,
            lanes=[lanes[position] for position in graph.lane_of],
            used=[lanes[position] for position in set(graph.lane_of)],
            unmet=[len(before) for before in graph.dependencies],
            states=[_WAITING] * len(graph.tasks),
            to_issue=len(graph.tasks),
            closed_gates=set(range(len(graph.gates))),
            admission=None if graph.rule is None or event.parts else StepAdmissions(graph),
        )
        self._steps[event.step] = step
        step.journal.append((now, event))
        commands: list[Command] = []
        by_program = event.programs and (earlier is None or earlier.by_program)
        by_program = by_program and graph.rule is None and all(lane.in_order for lane in step.used)
        if by_program or event.parts:
            step.by_program = True
            step.programs = event.parts or len({lane.lane.device for lane in step.used})
            commands.append(RunPrograms(step.number))
            step.journal.append((now, commands[0]))
        for lane in step.used:
            if not lane.in_order:
                lane.policy.begin(step, now)
                if lane.others is not None:
                    lane.others.begin(job, now)
        for gated in graph.gates:
            step.unmet[gated] += 1
        if earlier is not None:
            follow(earlier, step)
        for task, unmet in enumerate(step.unmet):
            if not unmet:
                self._make_ready(step, task, now)
        return commands + self._decide(step, step.used, now)

    def _earlier(self, event: StepSubmitted) -> StepState | None:
        """The step that a new one follows, unless it is over; raises ``InvalidTransition`` if it cannot be followed."""
        if event.after is None:
            return None
        if event.after > self._last_step:
            raise InvalidTransition(f"step {event.step} is to follow step {event.after}, which was not submitted")
        if (earlier := self._steps.get(event.after)) is None:
            return None
        if not earlier.running or earlier.following is not None:
            state = "followed by another one" if earlier.running else "not running any more"
            raise InvalidTransition(f"step {event.step} is to follow step {event.after}, which is {state}")
        if event.graph.rule is not None or earlier.graph.rule is not None:
            raise InvalidTransition(
                f"step {event.step} is to follow step {event.after}, but where a rule decides, no task of a device is "
                "known to be the last; submit it when that step is over"
            )
        return earlier

    def _lane(self, lane: Lane, graph: TaskGraph, job: JobAccount) -> LaneState:
        """The lane with a policy for a step of ``graph`` that ``job`` submits."""
        state = self._lanes.get(lane)
        if state is None:
            state = self._lanes[lane] = LaneState(lane)
            if self._make_policy is not None:
                state.use(self._make_policy(state))
        policy = state.policy
        if self._make_policy is not None or isinstance(policy, FairShare):
            return state
        assert isinstance(policy, FirstComeFirstServed)
        if job.is_named or job.share.background:
            shared = self._shared.share(state)
            for step in self._steps.values():
                if step.by_program or lane not in step.graph.lanes:
                    continue  # What runs by programs is over soon, and nothing of it is to be decided.
                shared.adopt(step, [step.states[task] for task in self._shared.tasks(step.graph, lane)])
            state.use(policy.hand_over(shared))
        elif graph.rule is not None and lane.queue is Queue.COMPUTE and state.in_order:
            state.use(policy.hand_over(FirstComeFirstServed(ruled_lane=state)))
        return state

    def _gate_opened(self, event: GateOpened, now: float) -> list[Command]:
        step = self._steps.get(event.step)
        if step is None or event.gate not in step.closed_gates:
            raise InvalidTransition(f"{event} came for a gate that is not there, or is open")
        step.closed_gates.remove(event.gate)
        step.journal.append((now, event))
        gated = step.graph.gates[event.gate]
        step.unmet[gated] -= 1
        if step.unmet[gated] or not step.running:
            return []
        return self._decide(step, [self._make_ready(step, gated, now)], now)

    def _cancelled(self, event: StepCancelled, now: float) -> list[Command]:
        step = self._steps.get(event.step)
        if step is None:
            raise InvalidTransition(f"step {event.step} is not under way")
        step.journal.append((now, event))
        if not step.to_issue or not step.running:  # Too late where all is done and its programs are about to end.
            return []
        return self._abort(step, Outcome.CANCELLED, now)

    def _fail(self, step: StepState, task: int, error: BaseException, now: float) -> list[Command]:
        """End the step because ``task`` failed, or cannot be decided about."""
        step.failed_task, step.error = task, error
        return self._abort(step, Outcome.FAILED, now)

    def _abort(self, step: StepState, outcome: Outcome, now: float) -> list[Command]:
        step.outcome = outcome
        for lane in step.used:
            if not step.by_program:
                lane.policy.drop(step)
        step.journal.append((now, Abort(step.number)))
        commands: list[Command] = [Abort(step.number)]
        # Those behind it may have begun with weights that it was to update.
        following = step.following
        while following is not None and following.step.finished:
            following = following.step.following
        if following is not None and following.step.running:
            commands += self._abort(following.step, Outcome.CANCELLED, now)
        return commands + self._decide(step, self._lanes.values(), now)

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
        touched = self._release(step, event.task, now)
        if (lane := step.lanes[event.task]).is_shared:
            touched.append(lane)  # Only what is issued can be late.
        return self._decide(step, touched, now)

    def _completed(self, event: TaskCompleted, now: float) -> list[Command]:
        step = self._find(event, _DISPATCHED, _ISSUED)
        step.journal.append((now, event))
        task = event.task
        touched = self._release(step, task, now) if step.states[task] is _DISPATCHED else []
        step.states[task] = _COMPLETED
        seconds = event.ended - event.started
        touched.append(self._give_back(step, task, seconds, event.ended))
        if step.job.is_named:
            step.job.measured(step.graph.tasks[task], seconds)
        if step.admission is not None and step.outcome is _OK:
            touched += self._completed_ruled(step, step.admission, task, now)
        return self._decide(step, touched, now)

    def _completed_ruled(self, step: StepState, admission: StepAdmissions, task: int, now: float) -> list[LaneState]:
        """All dependents of a ruled step's task wait for its completion, and its micro-batch may leave the device."""
        graph = step.graph
        touched = []
        for dependent in (*graph.local_dependents[task], *graph.remote_dependents[task]):
            step.unmet[dependent] -= 1
            if not step.unmet[dependent]:
                touched.append(self._make_ready(step, dependent, now))
        if step.is_admitted(task):
            touched += [self._make_ready(step, other, now) for other in admission.leave(task)]
        return touched

    def _failed(self, event: TaskFailed, now: float) -> list[Command]:
        step = self._find(event, _DISPATCHED, _ISSUED)
        step.journal.append((now, event))
        step.states[event.task] = _FAILED
        lane = self._give_back(step, event.task, None, now)
        if step.running:
            return self._fail(step, event.task, event.error, now)
        if step.error is None:
            step.failed_task, step.error = event.task, event.error
        return self._decide(step, [lane], now)

    def _dropped(self, event: TaskDropped, now: float) -> list[Command]:
        step = self._find(event, _DISPATCHED)
        if step.running:
            message = f"{event} came although step {event.step} is not aborted"
            raise InvalidTransition(message, step.story(event.task))
        step.journal.append((now, event))
        step.states[event.task] = _DROPPED
        return self._decide(step, [self._give_back(step, event.task, None, now)], now)

    def _program_ended(self, event: ProgramEnded, now: float) -> list[Command]:
        step = self._steps.get(event.step)
        if step is None or not step.programs:
            raise InvalidTransition(f"{event} came for a step of which no device runs a program")
        if step.running:
            if event.left or (step.programs == 1 and step.to_issue):
                raise InvalidTransition(f"{event} came although step {event.step} is not aborted")
        else:
            self._check_left(step, event)
        step.programs -= 1
        touched: list[LaneState] = []
        if step.following is not None and not step.programs:
            later = step.following.step
            touched = [self._make_ready(later, task, now) for task in step.following.ended()]
        for task in event.left:
            # The others were not dispatched, since what they wait for has not run either.
            if step.states[task] is _DISPATCHED:
                step.journal.append((now, TaskDropped(step.number, task)))
                step.states[task] = _DROPPED
                self._give_back(step, task, None, now)
        return self._decide(step, touched, now)

    @staticmethod
    def _check_left(step: StepState, event: ProgramEnded) -> None:
        """A device leaves what has not begun, and all devices together leave nothing unaccounted for."""
        known, left = range(len(step.states)), set(event.left)
        if begun := [task for task in left if task not in known or step.states[task] not in _NOT_BEGUN]:
            raise InvalidTransition(f"{event} came although task {begun[0]} was begun, or is none of the step's")
        if step.programs == 1:
            held = [task for task in known if step.states[task] is _DISPATCHED and task not in left]
            if held:
                message = f"{event} came while {step.graph.tasks[held[0]].id} is dispatched"
                raise InvalidTransition(message, step.story(held[0]))

    def _release(self, step: StepState, task: int, now: float) -> list[LaneState]:
        """Issue ``task``: its dependents on other devices need not wait for it. Returns their lanes."""
        step.states[task] = _ISSUED
        step.to_issue -= 1
        if step.outcome is not _OK or step.admission is not None:
            return []
        unmet = step.unmet
        touched = []
        for dependent in step.graph.remote_dependents[task]:
            unmet[dependent] -= 1
            if not unmet[dependent]:
                touched.append(self._make_ready(step, dependent, now))
        return touched

    @staticmethod
    def _give_back(step: StepState, task: int, seconds: float | None, now: float) -> LaneState:
        """The device does not hold ``task`` any more, on which it spent ``seconds`` until ``now``."""
        lane = step.lanes[task]
        step.held -= 1
        if step.by_program:
            return lane
        lane.in_flight -= 1
        if not lane.in_order:
            lane.policy.completed(step, task, seconds, now)
            if lane.others is not None and step.states[task] is not _DROPPED:
                lane.others.ended(step.job, now)
        return lane

    # Decisions

    def _decide(self, step: StepState, touched: Iterable[LaneState], now: float) -> list[Command]:
        """Hand over what ``touched`` lanes have ready, then see whether ``step`` is at its end."""
        commands: list[Command] = []
        if step.handed_over:
            self._dispatcher.note_handed_over(step, now)
        self._dispatch_ready(touched, commands, now)
        if not step.to_issue or (step.outcome is not _OK and step.is_drained):
            self._end(step, commands, now)
        return commands

    def _end(self, step: StepState, commands: list[Command], now: float) -> None:
        ends: list[Command] = []
        # Where nothing is held, programs are about to end: who is told of the end of the step may ask for its record.
        if not step.finished and (step.held or not step.programs):
            step.finished = True
            ends.append(StepFinished(step.number, step.outcome, step.failed_task, step.error))
        if step.is_drained:
            for lane in step.used:
                if not (lane.in_order or step.by_program):
                    lane.policy.end(step, now)
                    self._note_others(step, lane)
            if self._jobs.end(step.job):
                self._forget(step.job)
            ends.append(StepCompleted(step.number, step.outcome, step.failed_task, step.error))
        step.journal.extend((now, end) for end in ends)
        commands.extend(ends)

    @staticmethod
    def _note_others(step: StepState, lane: LaneState) -> None:
        """Note how long other jobs had the lane while ``step`` was under way."""
        if lane.others is None:
            return
        if taken := lane.others.taken(step.job):
            step.taken[lane.lane] = taken
        if step.job.steps == 1:
            lane.others.end(step.job)
