"""Where tasks and steps stand. Mutated by ``SchedulerState`` alone (``core/engine/scheduler.py``)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from asyncpipe.core.engine.admission import Admission
from asyncpipe.core.engine.events import Command, Event, Outcome, TaskCompleted
from asyncpipe.core.engine.lanes import Claim, LaneState
from asyncpipe.core.engine.share import JobState
from asyncpipe.core.graph.task import WHOLE_STEP, Queue
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.errors import ScheduleError

__all__ = ["StepState", "TaskState", "Visit", "check_invariants"]


class TaskState(IntEnum):
    """Where a task of a running step stands."""

    WAITING = 0
    READY = 1
    DISPATCHED = 2
    ISSUED = 3
    COMPLETED = 4
    FAILED = 5
    DROPPED = 6


@dataclass(slots=True, eq=False, repr=False)
class Visit:
    """One step of a named job on one lane."""

    step: StepState
    lane: int
    """Its position among the lanes of the graph."""
    left: int
    """Tasks that are not done."""
    seconds: float = 0.0
    """Device time of those that are."""
    _waiting: list[int] | None = None

    def waiting(self) -> list[int]:
        """The tasks of the lane that wait for others and can be the next one there.

        In an ordered graph that is the first one, since the others come after it; a rule may choose any.
        """
        graph, states = self.step.graph, self.step.states
        if self._waiting is None:
            self._waiting = [task for task, lane in enumerate(graph.lane_of) if lane == self.lane]
            self._waiting.reverse()
        if graph.rule is not None:
            self._waiting = [task for task in self._waiting if states[task] is TaskState.WAITING]
            return self._waiting
        while self._waiting and states[self._waiting[-1]] is not TaskState.WAITING:
            self._waiting.pop()
        return self._waiting[-1:]


@dataclass(slots=True, eq=False, repr=False)
class StepState:
    """One step under way."""

    number: int
    graph: TaskGraph
    job: JobState
    claims: list[Claim]
    """The claim of the step's job on the lane of each task."""
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
    admission: Admission | None = None
    """Of a ruled schedule."""
    visits: dict[Claim, Visit] = field(default_factory=dict)
    """Of a named job."""

    def story(self, task: int) -> list[tuple[float, Event | Command]]:
        """What happened to a task, oldest first."""
        return [(at, event) for at, event in self.journal if getattr(event, "task", None) == task]

    @property
    def is_stuck(self) -> bool:
        """Whether a rule refuses everything although nothing runs: it would wait for ever."""
        if self.admission is None or self.held or not self.to_issue or self.outcome is not Outcome.OK:
            return False
        return not any(owner is self for claim in self.claims for _, _, owner in claim.ready)

    def is_admitted(self, task: int) -> bool:
        """Whether ``task`` counts for the micro-batches that its device holds: compute of a micro-batch."""
        return self.claims[task].lane.lane.queue is Queue.COMPUTE and self.graph.tasks[task].microbatch != WHOLE_STEP

    def refused(self, task: int, how: str, cause: Exception | None = None) -> ScheduleError:
        """Why a rule cannot go on at ``task``."""
        found = self.graph.tasks[task]
        error = ScheduleError(
            f"schedule {self.graph.schedule!r}, device {found.lane.device}: admit does not let {found.id} in, {how}; "
            "it must answer the same every time"
        )
        error.__cause__ = cause
        return error

    def open_visits(self) -> None:
        """Tell the lanes of a named job what is to come."""
        tasks: dict[int, int] = {}
        for lane in self.graph.lane_of:
            tasks[lane] = tasks.get(lane, 0) + 1
        claims = dict(zip(self.graph.lane_of, self.claims, strict=True))
        for lane, left in tasks.items():
            visit = self.visits[claims[lane]] = Visit(self, lane, left)
            claims[lane].visits.append(visit)

    def close_visits(self, now: float) -> None:
        """Tell the lanes where something was left undone that it will not come any more."""
        for claim, visit in self.visits.items():
            if visit.left:
                visit.left = 0
                claim.leave(visit, now)

    def measure(self, event: TaskCompleted) -> None:
        """Charge the job for a task, and remember for the next ones how long it took."""
        claim, seconds = self.claims[event.task], event.ended - event.started
        claim.end(self.number, event.task, seconds, event.ended)
        visit = self.visits.get(claim)
        if visit is None:
            return
        self.job.took(self.graph.tasks[event.task], seconds)
        visit.left -= 1
        visit.seconds += seconds
        if not visit.left:
            claim.step_seconds = visit.seconds
            claim.leave(visit, event.ended)


def check_invariants(steps: Iterable[StepState], lanes: Iterable[LaneState], cap: int, now: float) -> None:
    """Assert what must hold between two events, once all lanes have settled, at ``now``."""
    held: dict[int, int] = {}
    owners: dict[int, JobState] = {}
    for step in steps:
        owners[step.number] = step.job
        counts = [step.states.count(state) for state in TaskState]
        assert step.held == counts[TaskState.DISPATCHED] + counts[TaskState.ISSUED], "held tasks are miscounted"
        for task, (state, claim) in enumerate(zip(step.states, step.claims, strict=True)):
            if state in (TaskState.DISPATCHED, TaskState.ISSUED):
                held[id(claim)] = held.get(id(claim), 0) + 1
            if state is TaskState.WAITING and step.outcome is Outcome.OK:
                assert step.unmet[task] > 0, f"{step.graph.tasks[task]} waits for nothing"
    for lane in lanes:
        for claim in lane.claims:
            assert claim.in_flight == held.get(id(claim), 0), f"{lane.lane} is miscounted"
            _check_claim(claim)
        assert lane.in_flight <= cap, f"{lane.lane} holds too many tasks"
        _check_background(lane, owners)
        # A shared lane may hold less than it has room for until its next event: who is there changes with time.
        room = 1 if lane.shared else cap
        for claim in lane.claims:
            if claim.ready and claim.has_room and not claim.job.share.background:
                busy = lane.in_flight >= room or (lane.shared and lane.awaited(claim, now))
                assert busy, f"{lane.lane} has work and room, but stands still"


def _check_claim(claim: Claim) -> None:
    """Assert what must hold of what a job is charged and expected to come for."""
    name = f"{claim.job.share.job!r} on {claim.lane.lane}"
    assert claim.lane.shared or len(claim.lane.claims) == 1, f"{name} is not alone"
    assert claim.promised >= 0.0, f"{name} is promised less than nothing"
    assert claim.in_flight or not claim.promised, f"{name} is promised what is not in flight"
    assert all(visit.left > 0 for visit in claim.visits), f"{name} waits for a step that is over there"
    assert not (claim.visits and claim.due is not None), f"{name} is under way and due"


def _check_background(lane: LaneState, owners: dict[int, JobState]) -> None:
    """Assert that background tasks are alone when they begin, and that no others are when they are held."""
    background = sum(claim.in_flight for claim in lane.claims if claim.job.share.background)
    assert background <= 1, f"{lane.lane} holds several background tasks"
    assert len(lane.holding) <= lane.in_flight, f"{lane.lane} remembers what it does not hold"
    for position, (step, _) in enumerate(lane.holding):
        assert not position or not owners[step].share.background, f"{lane.lane} has a background task behind another"
