"""Where steps and lanes stand. Mutated by ``SchedulerState`` and its ``Dispatcher`` alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncpipe.core.engine.events import Command, Event, Outcome
from asyncpipe.core.engine.lane_use import LaneUse, Taken
from asyncpipe.core.engine.microbatch_admission import StepAdmissions
from asyncpipe.core.graph.task import WHOLE_STEP, Lane, Queue
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.policies.fair_share import FairShare
from asyncpipe.core.policies.first_come import FirstComeFirstServed
from asyncpipe.core.policies.jobs import JobAccount
from asyncpipe.core.policies.policy import Policy, TaskState
from asyncpipe.errors import ScheduleError

__all__ = ["Following", "LaneState", "StepState", "follow"]

# Module constants: an enum attribute costs a lookup in the hottest loop.
_READY, _OK = TaskState.READY, Outcome.OK


class LaneState:
    """A lane: what its device holds, and who decides what comes next."""

    __slots__ = ("heap", "in_flight", "in_order", "is_shared", "lane", "others", "policy")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.in_flight = 0
        self.use(FirstComeFirstServed())

    def use(self, policy: Policy) -> None:
        """Have ``policy`` decide from now on."""
        self.policy = policy
        self.in_order = type(policy) is FirstComeFirstServed and policy.ruled_lane is None
        """Whether there is nothing to decide: what is ready goes at once, and the policy is told nothing."""
        self.is_shared = isinstance(policy, FairShare)
        """Whether the policy counts what each job holds; else the cap is the lane's."""
        self.others = None if isinstance(policy, FirstComeFirstServed) else LaneUse()
        """How long others had it, for each job, if several may use it."""
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
    """The gates of the graph, by index, that are closed."""
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
    following: Following | None = None
    """The step behind this one, if one was submitted."""
    behind: dict[int, tuple[StepState, int]] = field(default_factory=dict)
    """Of a step that follows another one: its tasks that still wait for that one's last task on their lane."""
    handed_over: list[int] = field(default_factory=list)
    """With programs: tasks whose dependencies are met, and whose dispatch is not noted yet."""
    taken: dict[Lane, Taken] = field(default_factory=dict)
    """By lane, how long other jobs had it; noted at the step's end."""

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


@dataclass(slots=True, eq=False)
class Following:
    """A step behind another one, kept with that other one: it begins on a device when that has all compute before.

    With the optimizer inside the step, the first forward of a stage needs the update of that stage, and nothing else of
    the step before. So each device goes over to the next step by itself; copies may come earlier::

        cpu:0   … B(2,0)  B(3,0)  U(0) │ F(0,0)  F(1,0)  …
        cpu:1   … B(3,1)  U(1) │          F(0,1)  …

    The first compute task of the later step on a device has one more dependency: all compute of the earlier step there.
    """

    step: StepState
    """The later one."""
    left: dict[LaneState, int]
    """By compute lane: how many tasks of the earlier step were not dispatched there."""
    first: dict[LaneState, int]
    """The first task of the later one on those lanes."""
    at_end: bool
    """Whether the later one begins only when the programs of the earlier one are at their end: then nothing is left
    by lane. Tasks that are handed over one by one would overtake what a device has not begun of its program."""

    def dispatched(self, lane: LaneState) -> int | None:
        """A task of the earlier step went to ``lane``; the later one's task that waits for it and nothing else."""
        if (left := self.left.get(lane)) is None:
            return None
        self.left[lane] = left - 1
        return None if left > 1 else self._released(lane)

    def ended(self) -> list[int]:
        """The programs of the earlier step are at their end: as ``dispatched``, for all lanes."""
        released = [self._released(lane) for lane in self.first] if self.at_end else []
        return [task for task in released if task is not None]

    def _released(self, lane: LaneState) -> int | None:
        task = self.first[lane]
        self.step.unmet[task] -= 1
        self.step.behind.pop(task, None)
        return None if self.step.unmet[task] or not self.step.running else task


def follow(earlier: StepState, later: StepState) -> None:
    """Put ``later``, which is new, behind ``earlier``, which is under way. Both have an order."""
    at_end = earlier.by_program and not later.by_program and earlier.programs > 0
    left: dict[LaneState, int] = {}
    first: dict[LaneState, int] = {}
    for position in set(later.graph.lane_of):
        if later.graph.lanes[position].queue is Queue.COMPUTE:
            # The order of a device is a chain, so everything else of it waits for this one.
            task = later.graph.lane_of.index(position)
            first[later.lanes[task]] = task
    last: dict[LaneState, int] = {}
    for task, (state, lane_state) in enumerate(zip(earlier.states, earlier.lanes, strict=True)):
        if state in (TaskState.WAITING, TaskState.READY) and lane_state in first and not at_end:
            left[lane_state] = left.get(lane_state, 0) + 1
            last[lane_state] = task
    for lane_state, task in first.items():
        if at_end or lane_state in left:
            later.unmet[task] += 1
        if lane_state in last:
            later.behind[task] = (earlier, last[lane_state])
    earlier.following = Following(later, left, first, at_end)
