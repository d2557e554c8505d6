"""Where steps and lanes stand. Mutated by ``SchedulerState`` and its ``Dispatcher`` alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncpipe.core.engine.events import Command, Event, Outcome
from asyncpipe.core.engine.jobs import JobAccount
from asyncpipe.core.engine.microbatch_admission import StepAdmissions
from asyncpipe.core.engine.policies.fair_share import FairShare
from asyncpipe.core.engine.policies.first_come import FirstComeFirstServed
from asyncpipe.core.engine.policies.policy import Policy, TaskState
from asyncpipe.core.graph.task import WHOLE_STEP, Lane, Queue
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.errors import ScheduleError

__all__ = ["LaneState", "StepState", "check_invariants"]

# Module constants: an enum attribute costs a lookup in the hottest loop.
_READY, _OK = TaskState.READY, Outcome.OK


class LaneState:
    """A lane: what its device holds, and who decides what comes next."""

    __slots__ = ("heap", "in_flight", "in_order", "is_shared", "lane", "policy")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.in_flight = 0
        self.use(FirstComeFirstServed())

    def use(self, policy: Policy) -> None:
        """Have ``policy`` decide from now on."""
        self.policy = policy
        self.in_order = type(policy) is FirstComeFirstServed
        """Whether there is nothing to decide: what is ready goes at once, and the policy is told nothing."""
        self.is_shared = isinstance(policy, FairShare)
        """Whether the policy counts what each job holds; else the cap is the lane's."""
        self.heap = policy.heap if isinstance(policy, FirstComeFirstServed) else []
        """The ready tasks of a lane that is in order."""


@dataclass(slots=True, eq=False, repr=False)
class StepState:
    """One step under way."""

    number: int
    graph: TaskGraph
    job: JobAccount
    lanes: list[LaneState]
    """The lane of each task."""
    used: list[LaneState]
    """The same lanes, each once."""
    unmet: list[int]
    """How many dependencies of each task still hold it back."""
    states: list[TaskState]
    to_issue: int
    closed_gates: set[int]
    """Micro-batches whose gradient the caller has not given yet."""
    admission: StepAdmissions | None
    """Of a ruled schedule."""
    journal: list[tuple[float, Event | Command]] = field(default_factory=list)
    outcome: Outcome = Outcome.OK
    failed_task: int | None = None
    error: BaseException | None = None
    held: int = 0
    """Tasks dispatched and neither completed, failed nor dropped."""
    finished: bool = False
    by_program: bool = False
    """Whether each device has the whole of its tasks, and runs them by its program."""
    programs: int = 0
    """How many devices are still at their programs."""
    handed_over: list[int] = field(default_factory=list)
    """With programs: tasks whose dependencies are met, and whose dispatch is not noted yet."""

    def __repr__(self) -> str:
        return f"<step {self.number} of {self.graph.schedule}>"

    @property
    def running(self) -> bool:
        """Whether its tasks are still handed over: it neither failed nor was cancelled."""
        return self.outcome is Outcome.OK

    @property
    def is_drained(self) -> bool:
        """Whether no device holds anything of it."""
        return not (self.held or self.programs)

    def is_ready(self, task: int, lane: LaneState) -> bool:
        """Whether ``task`` is one of the step's, and may be handed over on ``lane``."""
        if not 0 <= task < len(self.states):
            return False
        return self.states[task] is _READY and self.lanes[task] is lane and self.outcome is _OK

    def story(self, task: int) -> list[tuple[float, Event | Command]]:
        """What happened to a task, oldest first."""
        return [(at, event) for at, event in self.journal if getattr(event, "task", None) == task]

    @property
    def is_stuck(self) -> bool:
        """Whether a rule refuses everything although nothing runs: it would wait for ever."""
        if self.admission is None or self.held or not self.to_issue or not self.running:
            return False
        return self.states.count(TaskState.READY) == len(self.admission.refused())

    def is_admitted(self, task: int) -> bool:
        """Whether ``task`` counts for the micro-batches that its device holds: compute of a micro-batch."""
        return self.lanes[task].lane.queue is Queue.COMPUTE and self.graph.tasks[task].microbatch != WHOLE_STEP

    def refused(self, task: int, how: str, cause: Exception | None = None) -> ScheduleError:
        """Why a rule cannot go on at ``task``."""
        found = self.graph.tasks[task]
        error = ScheduleError(
            f"schedule {self.graph.schedule!r}, device {found.lane.device}: admit does not let {found.id} in, {how}; "
            "it must answer the same every time"
        )
        error.__cause__ = cause
        return error


def check_invariants(steps: Iterable[StepState], lanes: Iterable[LaneState], cap: int, now: float) -> None:
    """Assert what must hold between two events, once all policies were asked, at ``now``."""
    held: dict[LaneState, int] = {}
    for step in steps:
        counts = [step.states.count(state) for state in TaskState]
        assert not step.handed_over, "a dispatch was not noted"
        assert step.held == counts[TaskState.DISPATCHED] + counts[TaskState.ISSUED], "held tasks are miscounted"
        for task, (state, lane) in enumerate(zip(step.states, step.lanes, strict=True)):
            if state in (TaskState.DISPATCHED, TaskState.ISSUED) and not step.by_program:
                held[lane] = held.get(lane, 0) + 1
            if state is TaskState.WAITING and step.running:
                assert step.unmet[task] > 0, f"{step.graph.tasks[task]} waits for nothing"
    for lane in lanes:
        assert lane.in_flight == held.get(lane, 0), f"{lane.lane} is miscounted"
        assert lane.in_flight <= cap or lane.is_shared, f"{lane.lane} holds too many tasks"
        if lane.in_order and lane.in_flight < cap:
            assert not lane.heap, f"{lane.lane} has work and room, but stands still"
        lane.policy.check(now)
