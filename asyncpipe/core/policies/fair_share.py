"""Fair shares: the policy of a lane that several jobs use.

Each job has a *flow* on each lane that it uses: the queue of its ready tasks there, and a virtual time, which is the
device time that was measured for it, divided by its weight. Among foreground flows with a ready task the lowest virtual
time goes first. This is start-time fair queueing (P. Goyal, H. M. Vin, H. Cheng, "Start-time Fair Queuing", SIGCOMM
1996): while two jobs always have a ready task, their device times by weight differ by a task or two of each::

    lane ──┬── flow of job a, weight 1:  ready ▢▢▢   virtual time 6.0 = 6.0 s / 1   ◀── next
           ├── flow of job b, weight 3:  ready ▢     virtual time 6.3 = 18.9 s / 3
           └── flow of job c, background: only where the lane would idle (``backfill.py``)

A task is charged what was measured, when it is done. Until then its expected time counts, so that a lane with two tasks
in flight does not take both from one job.

**Catching up.** In plain fair queueing, a flow that had nothing ready starts again at the lane's virtual time. But a
pipeline has nothing ready again and again, in its bubbles and between its steps, and would lose a part of its share
each time. So within a step nothing is lost, and at the start of the next one a flow may catch up what it missed, up to
the device time of one of its steps. That covers bubbles and the optimizer; after a long pause it does not take the lane
from the others.

**Waiting for a flow that lags.** Going first when both are ready is not enough. In 1F1B a backward is ready just when
its gradient arrives, so a job rarely has two ready tasks on a lane: another job gets every gap, delays the next task,
and so makes the next gap. A lane therefore waits for a flow that lags by more than a part of its step, if a task of it
is expected before the other's task would be done. Disk schedulers know this as anticipatory scheduling (S. Iyer, P.
Druschel, "Anticipatory scheduling: a disk scheduling framework to overcome deceptive idleness in synchronous I/O", SOSP
2001). As there, the wait is bounded: a lane idles no longer than the task that it holds back would take. Without the
bound, lanes could wait for one another in a circle.

**Queue depth.** What a device holds cannot be taken back, so shares are as coarse as what is handed over ahead. While
several foreground jobs use a lane, it holds two tasks: one runs and one is next, so that the device need not wait for
the scheduler. So it does for background jobs, where the gap has time for both tasks: on a busy machine, the scheduler
answers after a good part of a short task.

**A task that does not end.** An asynchronous device runs each job's tasks on streams of their own. So one that was
issued there and is far later than expected, as a kernel that hangs, occupies nothing that other jobs need: its job's
tasks hold no place on the lane while it lasts, and nobody waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from math import inf
from weakref import WeakKeyDictionary

from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.policies.backfill import BackfillLookahead
from asyncpipe.core.policies.flow import Flow, StepOnLane
from asyncpipe.core.policies.jobs import JobAccount
from asyncpipe.core.policies.policy import Chosen, LaneView, Policy, StepView, TaskState

__all__ = ["MOST_AHEAD", "FairShare", "LaneMode", "SharedLanes"]

MOST_AHEAD = 2
"""Tasks that a lane of several foreground jobs holds: with one the device would idle until the scheduler answers, and
with more a job that comes back would wait for all of them."""

LATE_AFTER = 0.1
"""Seconds by which a task is late, beyond twice its expected time: longer than the scheduler's own delays."""

_COMPUTE = Queue.COMPUTE
_ISSUED = TaskState.ISSUED


class SharedLanes:
    """The lanes of one scheduler that are shared: each one's policy looks at the others when it looks ahead."""

    def __init__(self, cap: int) -> None:
        """``cap`` bounds the tasks that a lane holds."""
        self.cap = cap
        self.policies: dict[Lane, FairShare] = {}
        self._tasks: WeakKeyDictionary[TaskGraph, dict[Lane, list[int]]] = WeakKeyDictionary()

    def share(self, lane: LaneView) -> FairShare:
        """A policy for one more lane."""
        policy = self.policies[lane.lane] = FairShare(lane, self)
        return policy

    def tasks(self, graph: TaskGraph, lane: Lane) -> Sequence[int]:
        """The tasks of ``graph`` on ``lane``, in their order."""
        if graph not in self._tasks:
            tasks: dict[Lane, list[int]] = {lane: [] for lane in graph.lanes}
            for task, position in enumerate(graph.lane_of):
                tasks[graph.lanes[position]].append(task)
            self._tasks[graph] = tasks
        return self._tasks[graph][lane]


class LaneMode(Enum):
    """What a shared lane does with its ready tasks.

    ::

        a second job comes        not chosen                     no time behind what the lane holds
        ALONE ──────────▶ OPEN ──────────────▶ HELD_BACK ──────────────────────────────────▶ FULL
          ◀──────────────  ◀────────────────────  ◀───────────────────────────────────────────
        the others are forgotten   nothing is left to hold back   a task was handed over, or is done
    """

    ALONE = auto()
    """One foreground job has the lane for itself: its next task goes at once."""
    OPEN = auto()
    """What is ready goes when the policy is asked."""
    HELD_BACK = auto()
    """A ready task waits for a better moment: ``backfill`` looks for one, and ``wake_at`` says when to look again."""
    FULL = auto()
    """As ``HELD_BACK``, and there was no time for one more task behind those that the lane holds."""


class FairShare(Policy):
    """Foreground jobs by weight, and background jobs where the lane would idle."""

    def __init__(self, lane: LaneView, lanes: SharedLanes) -> None:
        self.lane = lane
        self._lanes = lanes
        self._flows: dict[JobAccount, Flow] = {}
        self._only: Flow | None = None
        """The flow of a foreground job that has the lane for itself."""
        self._clock = [0.0, 0.0]
        """The virtual time of foreground and of background flows: the latest at which a task began."""
        self._holding: dict[tuple[int, int], tuple[float | None, float, StepView]] = {}
        """(expected seconds, when handed over, step) by (step, task) of the tasks in flight, in that order."""
        self._busy_since = 0.0
        """When the first of them began."""
        self._held_back_since: float | None = None
        """Since when the lane idles for a flow that lags; ``None`` once a task is handed over."""
        self.mode = LaneMode.OPEN
        self._wake_at: float | None = None
        """When to look again, while the lane is held back."""
        self._held = 0
        """The tasks in flight of flows that did not stand when this was last asked."""
        self._any_late = False
        self._late_at: float | None = None
        """When the next flow will stand."""

    # What happens

    def begin(self, step: StepView, now: float) -> None:
        job, background = step.job, step.job.share.background
        flow = self._flows.get(job)
        if flow is None:
            flow = self._flows[job] = Flow(job, background, self._clock[background])
        elif flow.background != background:
            flow.background, flow.virtual = background, self._clock[background]
        self._note_flows()
        if job.is_named:
            tasks = self._lanes.tasks(step.graph, self.lane.lane)
            flow.steps.append(StepOnLane(step, len(tasks), list(reversed(tasks))))

    def _note_flows(self) -> None:
        flows = list(self._flows.values())
        self._only = flows[0] if len(flows) == 1 and not flows[0].background else None
        if self._only is not None:
            self.mode = LaneMode.ALONE
        elif self.mode is LaneMode.ALONE:
            self.mode = LaneMode.OPEN

    def adopt(self, step: StepView, states: Iterable[TaskState]) -> None:
        """Take over a step, whose tasks here are in ``states``, from a policy that measures nothing."""
        self.begin(step, 0.0)
        self._flows[step.job].in_flight += sum(TaskState.DISPATCHED <= s <= TaskState.ISSUED for s in states)

    def ready(self, step: StepView, task: int, now: float) -> None:
        flow = self._only or self._flows[step.job]
        if flow.left_at is not None:
            flow.gaps.append(now - flow.left_at)
            flow.left_at = None
        flow.ready.ready(step, task, now)

    def started(self, step: StepView, task: int, now: float) -> None:
        flow = self._only or self._flows[step.job]
        flow.in_flight += 1
        self._held += 1
        self._held_back_since = None
        self._look_behind_again()
        if not self._holding:
            self._busy_since = now
        seconds = flow.job.expected(step.graph.tasks[task])
        self._holding[step.number, task] = (seconds, now, step)
        flow.expected += seconds or 0.0

    def completed(self, step: StepView, task: int, seconds: float | None, now: float) -> None:
        flow = self._only or self._flows[step.job]
        flow.in_flight -= 1
        key = (step.number, task)
        was_first = next(iter(self._holding), None) == key
        expected = (self._holding.pop(key, None) or (None,))[0] or 0.0
        flow.completed_at = now
        self._look_behind_again()
        if was_first:
            handed_over = next((at for _, at, _ in self._holding.values()), now)
            self._busy_since = max(now, handed_over)
        flow.expected = max(0.0, flow.expected - expected) if flow.in_flight else 0.0
        # A task that failed is charged what was expected of it; one that was dropped did not run.
        charged = seconds
        if charged is None:
            charged = 0.0 if step.states[task] is TaskState.DROPPED else expected
        self._clock[flow.background] = max(self._clock[flow.background], flow.virtual)
        flow.virtual += charged / flow.job.share.weight
        if not flow.in_flight and not flow.ready.heap and not flow.steps:
            flow.was_idle = True
        if seconds is not None:
            self._account(flow, step, seconds, now)

    @staticmethod
    def _account(flow: Flow, step: StepView, seconds: float, now: float) -> None:
        for here in flow.steps:
            if here.step is step:
                here.left -= 1
                here.seconds += seconds
                if not here.left:
                    flow.step_seconds = here.seconds
                    flow.close(here, now)
                return

    def drop(self, step: StepView) -> None:
        self._flows[step.job].ready.drop(step)

    def end(self, step: StepView, now: float) -> None:
        flow = self._only or self._flows[step.job]
        for here in flow.steps:
            if here.step is step:
                flow.close(here, now)
                return

    def forget(self, job: JobAccount) -> None:
        self._flows.pop(job, None)
        self._note_flows()

    # What is decided

    @property
    def at_once(self) -> bool:
        """Whether one foreground job has the lane for itself, and no rule decides."""
        if self._only is None:
            return False
        heap = self._only.ready.heap
        return not heap or heap[0][3].graph.rule is None or self.lane.lane.queue is not _COMPUTE

    def choose(self, now: float) -> Chosen | None:
        if (only := self._only) is not None:
            return only.ready.choose(now) if only.ready.heap and self._has_room(only, self._lanes.cap) else None
        self._note_late(now)
        flow = self._next(now)
        if flow is None:
            self._held_back_since = None
            self._hold_back(any(flow.ready.heap and flow.background for flow in self._flows.values()))
            return None
        if self._awaited(flow, now):
            self._hold_back(True)
            return None
        return flow.ready.choose(now)

    def backfill(self, now: float) -> Chosen | None:
        """A task for a lane that idles although tasks are ready; asked when all lanes have chosen.

        It is a task of a background job, or of a foreground job that is held back for one that lags, if it would be
        done before the tasks that the lane is kept free for. Where a background task runs, another one may be handed
        over behind it, if there is time for both.
        """
        lookahead = BackfillLookahead(now, self._lanes.policies)
        if self._held and self.lane.in_flight:
            chosen = self._fitting_behind(lookahead, now) if self._may_hold_another() else None
            if chosen is None:
                self.mode = LaneMode.FULL
            return chosen
        chosen = self._fitting(lookahead, now)
        self._wake_at = lookahead.wake_at
        return chosen

    def _may_hold_another(self) -> bool:
        """Whether a task behind what the lane holds may be looked for: that is one task, of a background job."""
        if self.mode is LaneMode.FULL or self._any_late or self.lane.in_flight >= min(self._lanes.cap, MOST_AHEAD):
            return False
        return all(step.job.share.background for _, _, step in self._holding.values())

    def _fitting_behind(self, lookahead: BackfillLookahead, now: float) -> Chosen | None:
        left, _ = self.busy(now)
        foreground = [flow for flow in self._flows.values() if not flow.background]
        if left == inf or any(flow.ready.heap for flow in foreground):
            return None
        # Only the one whose turn it is: behind the others' tasks the lane would never be empty for it.
        flow = next(iter(self._background()), None)
        if flow is None or flow.next_seconds() is None or not _fits(flow, lookahead, foreground, left):
            return None
        return flow.ready.choose(now)

    def _fitting(self, lookahead: BackfillLookahead, now: float) -> Chosen | None:
        flow = self._next(now)
        if flow is not None:
            fits = _fits(flow, lookahead, self._awaited(flow, now)) or self._has_waited(flow, lookahead, now)
            return flow.ready.choose(now) if fits else None
        background = self._background()
        self._hold_back(bool(background))
        foreground = [flow for flow in self._flows.values() if not flow.background]
        for flow in background:
            if _fits(flow, lookahead, foreground):
                return flow.ready.choose(now)
        return None

    @property
    def holds_back(self) -> bool:
        """Whether a ready task was not chosen, so that ``backfill`` has something to look at."""
        return self.mode in (LaneMode.HELD_BACK, LaneMode.FULL)

    def _hold_back(self, is_held: bool) -> None:
        if not is_held:
            self.mode = LaneMode.OPEN
        elif self.mode is not LaneMode.FULL:
            self.mode = LaneMode.HELD_BACK

    def _look_behind_again(self) -> None:
        if self.mode is LaneMode.FULL:
            self.mode = LaneMode.HELD_BACK

    @property
    def waiting(self) -> Sequence[JobAccount]:
        """The jobs that have a ready task here."""
        return [job for job, flow in self._flows.items() if flow.ready.heap]

    def wake_at(self, now: float) -> float | None:
        if self.mode is LaneMode.ALONE:
            return None
        if not self._held:
            return self._wake_at if self.holds_back else None
        return self._late_at if self._late_at is not None and any(f.ready.heap for f in self._flows.values()) else None

    def _note_late(self, now: float) -> None:
        """Find the flows that stand, and when others will if nothing happens."""
        late_at: dict[JobAccount, float] = {}
        for (_, task), (expected, handed_over, step) in self._holding.items():
            if step.states[task] is _ISSUED and step.job not in late_at:
                began = max(handed_over, self._flows[step.job].completed_at)
                late_at[step.job] = began + 2 * (expected or 0.0) + LATE_AFTER
        self._held, self._late_at = self.lane.in_flight, None
        if not (late_at or self._any_late):
            return
        for flow in self._flows.values():
            flow.is_late = late_at.get(flow.job, inf) <= now
            self._held -= flow.in_flight if flow.is_late else 0
        self._any_late = self._held < self.lane.in_flight
        self._late_at = min((at for at in late_at.values() if at > now), default=None)

    def _next(self, now: float) -> Flow | None:
        """The foreground flow whose turn it is; ``None`` if none has a task that may go."""
        room = self._room(now)
        if self._held >= room:
            return None
        ready = [
            flow
            for flow in self._flows.values()
            if flow.ready.heap and not flow.background and self._has_room(flow, room)
        ]
        if not ready:
            return None
        self._catch_up(ready)
        return min(ready, key=_tag)

    def _has_room(self, flow: Flow, room: int) -> bool:
        """Whether the device may hold one more task of the job, by the rule, if any, of its first ready one as well."""
        if flow.in_flight >= room:
            return False
        rule = flow.ready.heap[0][3].graph.rule
        return rule is None or self.lane.lane.queue is not _COMPUTE or flow.in_flight < rule.ahead

    def _room(self, now: float) -> int:
        """How many tasks the lane may hold in all, of jobs that do not stand."""
        active = sum(not flow.background and flow.is_active(now) for flow in self._flows.values())
        return self._lanes.cap if active < 2 else min(self._lanes.cap, MOST_AHEAD)

    def _catch_up(self, flows: Iterable[Flow]) -> None:
        """Let flows that were idle have what they missed of the lane, up to the device time of one of their steps."""
        for flow in flows:
            if flow.was_idle:
                flow.was_idle = False
                credit = flow.step_seconds / flow.job.share.weight
                flow.virtual = max(flow.virtual, self._clock[flow.background] - credit)

    def _awaited(self, chosen: Flow, now: float) -> list[Flow]:
        """The foreground flows that lag behind ``chosen`` and may come: there must be time for it before they do."""
        return [
            flow
            for flow in self._flows.values()
            if flow is not chosen and not flow.ready.heap and not flow.background and not flow.is_late
            if flow.job.is_named and flow.is_active(now) and flow.lags(chosen)
        ]

    def _background(self) -> list[Flow]:
        """The background flows with something ready, in the order of their turns."""
        ready = [flow for flow in self._flows.values() if flow.ready.heap and flow.background and not flow.is_late]
        self._catch_up(ready)
        return sorted(ready, key=_tag)

    def _has_waited(self, flow: Flow, lookahead: BackfillLookahead, now: float) -> bool:
        """Whether the lane has idled for as long as the next task of ``flow`` would have taken."""
        if self._held_back_since is None:
            self._held_back_since = now
        until = self._held_back_since + (flow.next_seconds() or 0.0)
        return now >= until or lookahead.look_again(until)

    def busy(self, now: float, last: Chosen | None = None) -> tuple[float, float]:
        """(seconds until the lane is done with all that it holds, or with ``last``; when its first task should end).

        The seconds are infinite if that is not known, and the end is if the lane holds nothing.
        """
        total, end = 0.0, float("inf")
        key = None if last is None else (last[0].number, last[1])
        for position, (held, (seconds, _, _)) in enumerate(self._holding.items()):
            if seconds is None:
                return float("inf"), end
            total += seconds
            if not position:
                end = self._busy_since + seconds
                total = max(0.0, end - now)
            if held == key:
                break
        return total, end


def _fits(flow: Flow, lookahead: BackfillLookahead, others: Iterable[Flow], left: float = 0.0) -> bool:
    """Whether the next task of ``flow``, which begins in ``left`` seconds, would be done before ``others`` need the
    lane."""
    seconds = flow.next_seconds()
    if seconds is None:
        return True
    expected = ((other.due, ((here.step, here.next_waiting()) for here in other.steps)) for other in others)
    return lookahead.is_free(seconds, expected, left)


def _tag(flow: Flow) -> float:
    return flow.tag
