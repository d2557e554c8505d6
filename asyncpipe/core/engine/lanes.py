"""Lanes that several jobs share: whose task comes next.

Each job has a *claim* on each lane that it uses: the heap of its ready tasks there, and a virtual time, its measured
device time by its weight. Among foreground jobs with something ready the lowest virtual time goes first, which is
start-time fair queueing (P. Goyal, H. M. Vin, H. Cheng, "Start-time Fair Queuing", SIGCOMM 1996): over any time in
which two jobs always have something ready, their device times by weight differ by a task or two of each::

    lane ──┬── claim of job a, weight 1:  ready ▢▢▢   virtual 6.0 = 6.0 s / 1   ◀── next
           ├── claim of job b, weight 3:  ready ▢     virtual 6.3 = 18.9 s / 3
           └── claim of job c, background: only where the lane would idle (outlook.py)

What was measured is charged when a task is done. Until then its expected time counts, so that a lane with two tasks
in flight does not take both of them from one job.

That queueing gives nothing to who was away: he starts again at the lane's virtual time. But a pipeline is away all
the time, in its bubbles and between its steps, and a share of 3 in 4 would shrink with each. So nothing is lost within
a step, and with the next one a job may catch up what it missed, but no more than one of its steps takes on the lane:
enough for bubbles and the optimizer's time, too little to take the lane from the others after a long pause.

Nor is it enough to go first when both are ready. Where a backward is ready just when its gradient arrives, as in 1F1B,
a job has hardly ever two ready tasks on a lane; whoever else has one gets every gap, delays the next task, and so makes
the next gap. So a lane waits for a job that lags behind by more than a part of its step, if a task of it is expected
before the other's would be over (as for background tasks, ``outlook.py``). Such waiting is known from disks: S.
Iyer, P. Druschel, "Anticipatory scheduling: a disk scheduling framework to overcome deceptive idleness in synchronous
I/O", SOSP 2001. As there, it has an end: a lane stands empty for others no longer than the task that it holds back
would have taken. Lanes may come to wait for one another in a circle, as what is expected changes while they wait.

Tasks that a device holds cannot be taken back, so shares are as coarse as what is handed over ahead. While several
foreground jobs are at work on a lane it holds two tasks: one runs, and one is there when it ends, so that the device
need not wait for the scheduler.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from asyncpipe.core.engine.share import JobState
from asyncpipe.core.graph.task import Lane, Queue

if TYPE_CHECKING:
    from asyncpipe.core.engine.state import StepState, Visit

__all__ = ["MOST_AHEAD", "Claim", "LaneState"]

MOST_AHEAD = 2
"""Tasks that a lane of several foreground jobs holds: with one the device would idle until the scheduler answers, and
with more a job that comes back would wait for all of them."""

PATIENCE = 0.25
"""The part of its own step's device time by which a job must lag behind before a lane idles for it."""

_LAST_GAPS = 5


@dataclass(slots=True, eq=False, repr=False)
class Claim:
    """What one job has on one lane."""

    job: JobState
    lane: LaneState
    virtual: float = 0.0
    """Device seconds by weight, that is how much of its share the job has had."""
    ready: list[tuple[int, int, StepState]] = field(default_factory=list)
    """Lowest (step, rank) first; a task's rank is its number, unless a rule ranks it."""
    in_flight: int = 0
    timed: bool = False
    """Whether tasks are charged and measured: not for a pipeline that is, and always was, by itself."""
    promised: float = 0.0
    """The seconds that the tasks in flight are expected to take; they are not charged yet."""
    away: bool = False
    """Whether the job had nothing here, neither ready nor in flight, since it was last chosen."""
    step_seconds: float = 0.0
    """Device time of the last whole step."""
    visits: list[Visit] = field(default_factory=list)
    """Of steps that are not done here; of a named job."""
    left_at: float | None = None
    """When the last step was done here, until something of the next one is ready."""
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST_GAPS))
    """How long the lane had nothing of the job between two steps, the last few times."""

    @property
    def tag(self) -> float:
        """What is compared with other claims: the virtual time once all that is in flight is charged."""
        return self.virtual + self.promised / self.job.share.weight

    @property
    def has_room(self) -> bool:
        """Whether the rule, if any, of the first ready task lets the device hold one more of the job."""
        rule = self.ready[0][2].graph.rule
        return rule is None or self.lane.lane.queue is not Queue.COMPUTE or self.in_flight < rule.ahead

    @property
    def due(self) -> float | None:
        """When the next step's first task is expected here; ``None`` while a step is under way, or without experience.

        By the median of the last gaps, since one of them may have been an evaluation or a snapshot.
        """
        return None if self.left_at is None or self.visits or not self.gaps else self.left_at + median(self.gaps)

    def is_here(self, now: float) -> bool:
        """Whether the job is at work on the lane: a step is under way, or it is back soon."""
        if self.visits or (self.job.steps and not self.job.is_named):
            return True
        due = self.due
        return due is not None and self.left_at is not None and now - due < due - self.left_at

    def come_back(self, now: float) -> None:
        """Note that the next step's first task is ready."""
        assert self.left_at is not None
        self.gaps.append(now - self.left_at)
        self.left_at = None

    def leave(self, visit: Visit, now: float) -> None:
        """Note that a step is over here."""
        self.visits.remove(visit)
        self.away = True
        if not self.visits:
            self.left_at = now

    def catch_up(self) -> None:
        """Let the job, if it was away, have what it missed of the lane, up to the device time of one of its steps."""
        if self.away:
            self.away = False
            credit = self.step_seconds / self.job.share.weight
            self.virtual = max(self.virtual, self.lane.clock[self.job.share.background] - credit)

    def lags(self, other: Claim) -> bool:
        """Whether the job is so far behind ``other`` that the lane may wait for it."""
        return self.tag + PATIENCE * self.step_seconds / self.job.share.weight < other.tag

    def begin(self, step: int, task: int, seconds: float | None, now: float) -> None:
        """A task that is expected to take ``seconds`` was handed over."""
        lane = self.lane
        lane.empty_since = None
        if not lane.holding:
            lane.since = now
        lane.holding[step, task] = (seconds, now)
        self.promised += seconds or 0.0

    def end(self, step: int, task: int, took: float | None, now: float) -> None:
        """A task is done after ``took`` seconds of device time; ``None`` where nobody knows: as many as expected."""
        lane, share = self.lane, self.job.share
        first = next(iter(lane.holding), None) == (step, task)
        promised = (lane.holding.pop((step, task), None) or (None, now))[0] or 0.0
        if first:
            dispatched = next(iter(lane.holding.values()), (None, now))[1]
            lane.since = max(now, dispatched)
        self.promised = max(0.0, self.promised - promised) if self.in_flight else 0.0
        lane.clock[share.background] = max(lane.clock[share.background], self.virtual)
        self.virtual += (promised if took is None else took) / share.weight
        if not self.in_flight and not self.ready and not self.visits:
            self.away = True


@dataclass(slots=True, eq=False, repr=False)
class LaneState:
    """A lane, and who has something there."""

    lane: Lane
    claims: list[Claim] = field(default_factory=list)
    shared: bool = False
    """Whether there is anything to share: several jobs, or a background job, which always looks at what others do."""
    clock: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """The virtual time of foreground and of background jobs: the latest at which a task began."""
    holding: dict[tuple[int, int], tuple[float | None, float]] = field(default_factory=dict)
    """(expected seconds, when dispatched) by (step, task) of timed tasks in flight, in the order of dispatch."""
    since: float = 0.0
    """When the first of them began."""
    empty_since: float | None = None
    """Since when it holds nothing back but for others; ``None`` once something is handed over."""

    @property
    def in_flight(self) -> int:
        """How many tasks its device holds."""
        return sum(claim.in_flight for claim in self.claims)

    def claim(self, job: JobState) -> Claim:
        """The claim of ``job``, which begins at the lane's virtual time if it is new here."""
        for claim in self.claims:
            if claim.job is job:
                return claim
        claim = Claim(job, self, virtual=self.clock[job.share.background])
        self.claims.append(claim)
        self.note_claims()
        return claim

    def drop(self, job: JobState) -> None:
        """Forget about ``job``."""
        self.claims = [claim for claim in self.claims if claim.job is not job]
        self.note_claims()

    def change_class(self, job: JobState) -> None:
        """Let ``job``, now of the other class, begin at the virtual time of that one."""
        for claim in self.claims:
            if claim.job is job:
                claim.virtual = self.clock[job.share.background]
        self.note_claims()

    def note_claims(self) -> None:
        """See who is there."""
        self.shared = len(self.claims) > 1 or any(claim.job.share.background for claim in self.claims)
        for claim in self.claims:
            claim.timed = claim.timed or self.shared or claim.job.is_named

    def room(self, now: float, cap: int) -> int:
        """How many tasks it may hold in all."""
        here = sum(not claim.job.share.background and claim.is_here(now) for claim in self.claims)
        return cap if here < 2 else min(cap, MOST_AHEAD)

    def first(self, now: float, cap: int) -> Claim | None:
        """The foreground job whose turn it is; ``None`` if none has anything that may go."""
        ready = [claim for claim in self.claims if claim.ready and not claim.job.share.background and claim.has_room]
        if not ready or self.in_flight >= self.room(now, cap):
            return None
        for claim in ready:
            claim.catch_up()
        return min(ready, key=_tag)

    def awaited(self, chosen: Claim, now: float) -> list[Claim]:
        """The foreground jobs that lag behind ``chosen`` and may come: it has to look whether there is time for it."""
        return [
            claim
            for claim in self.claims
            if claim is not chosen and not claim.ready and not claim.job.share.background
            if claim.job.is_named and claim.is_here(now) and claim.lags(chosen)
        ]

    def background(self) -> list[Claim]:
        """The background jobs with something ready, whose turn it is first."""
        ready = [claim for claim in self.claims if claim.ready and claim.job.share.background]
        for claim in ready:
            claim.catch_up()
        return sorted(ready, key=_tag)


def _tag(claim: Claim) -> float:
    return claim.tag
