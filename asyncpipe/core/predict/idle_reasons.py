"""Why devices were idle: every gap of a compute lane, divided by what the task that ends it waited for.

The times at which the last input of that task was where divide the gap::

    free         made         landed         left          there         begins
    ─────┤        ┊             ┊             ┊              ┊             ├─────
         │◀ depen-▶│◀── edge ──▶│◀─ dispatch ▶│◀─── copy ───▶│◀─ dispatch ▶│
           dency
    made     computed by another task                      landed  in the task's worker, if it came from another one
    left     taken by its copy, if it needs one            there   on the task's device

A copy begins when it is dispatched, even if it then waits for earlier copies of its lane. Where a dispatch was late
because another job had the device, that part is *shared*, and no fault of the scheduler. The time after a device's last
task is the *drain*. Busy and idle seconds of a device add up to the step. A gap counts for the stage of the task that
ends it, the drain for the stage of the last task.

``divide_gap`` is the one definition. Metrics call it with arrays, for many steps at once; ``waits`` calls it for each
task of one step, for pictures and for the page, and takes about 30 times as long.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from asyncpipe.core.engine.lane_use import Taken
from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.core.kinds import COPY_KINDS, TaskKind
from asyncpipe.core.predict.report import Report, TaskTime
from asyncpipe.core.records.step_record import StepRecord

__all__ = ["DividedGap", "IdleReason", "Wait", "divide_gap", "stage_idle", "waits"]


class IdleReason(StrEnum):
    """What a compute lane waited for."""

    DEPENDENCY = "dependency"
    """Another device, or the caller's part of a backward, had not yet computed what the next task reads."""
    EDGE = "edge"
    """It was computed in another worker and on its way to this one."""
    COPY = "copy"
    """It was computed and being copied."""
    SHARED = "shared"
    """All inputs were there, and another job had the device."""
    DISPATCH = "dispatch"
    """All inputs were there and no other job had the device, and the task or the copy before it had not begun."""
    DRAIN = "drain"
    """The device had no task left in this step."""


class DividedGap(NamedTuple):
    """The borders of a gap's parts, in their order: numbers, or arrays of equal shape."""

    free: Any
    made: Any
    landed: Any
    left: Any
    there: Any
    begins: Any

    def seconds(self, shared: Any) -> dict[IdleReason, Any]:
        """The parts by reason; of the waits for a dispatch, another job had the device for ``shared`` seconds."""
        return {
            IdleReason.DEPENDENCY: self.made - self.free,
            IdleReason.EDGE: self.landed - self.made,
            IdleReason.COPY: self.there - self.left,
            IdleReason.SHARED: shared,
            IdleReason.DISPATCH: (self.left - self.landed) + (self.begins - self.there) - shared,
        }


def divide_gap(
    gap: DividedGap, *, larger: Callable[[Any, Any], Any] = max, smaller: Callable[[Any, Any], Any] = min
) -> DividedGap:
    """``gap`` with each border between the one before it and the end of the gap.

    ``larger`` and ``smaller`` compare two values; numpy's ``maximum`` and ``minimum`` divide arrays of gaps. Clocks of
    threads and devices differ a little, so borders may be out of order.
    """
    begins = gap.begins
    made = smaller(larger(gap.made, gap.free), begins)
    there = smaller(larger(gap.there, made), begins)
    landed = smaller(larger(gap.landed, made), there)
    left = smaller(larger(gap.left, landed), there)
    return DividedGap(gap.free, made, landed, left, there, begins)


class Wait(NamedTuple):
    """What a task waited for, and what its lane was idle for meanwhile."""

    name: str
    """The last thing: an input, its way here, the task before it on its lane, or another job; empty for nothing."""
    until: float
    """When that ended, on the clock of the report."""
    idle: Mapping[IdleReason, float]
    """Seconds by reason that the lane was idle before the task."""


def waits(record: StepRecord, result: Report, earlier: Mapping[Lane, float] | None = None) -> dict[int, Wait]:
    """What each completed task of ``record``, whose report is ``result``, waited for, by task number.

    ``earlier`` says when each lane was at the end of the steps before, if there are any on the clock of the report.
    """
    inputs = _Inputs(record, result, earlier or {})
    before: dict[Lane, tuple[float, str]] = {lane: (end, "the step before") for lane, end in (earlier or {}).items()}
    found: dict[int, Wait] = {}
    for time in result.tasks:
        lane = time.task.lane
        gap = divide_gap(inputs.gap(time))
        idle = gap.seconds(_shared(record, result, lane, gap))
        name, until = max(inputs.candidates(time, before.get(lane)), default=("", result.began), key=_by_time)
        if idle[IdleReason.SHARED] > idle[IdleReason.DISPATCH]:
            spans = [span for span in result.taken.get(lane.device, ()) if span[0] < time.start]
            name, until = "another job, which had the device", min(spans[-1][1], time.start) if spans else until
        found[time.task.number] = Wait(name, until, idle)
        if time.seconds > 0:
            before[lane] = time.end, time.task.id
    return found


def stage_idle(record: StepRecord, result: Report) -> list[dict[IdleReason, float]]:
    """For each stage of ``record``, whose report is ``result``, the idle seconds of its device by reason."""
    graph, waited = record.graph, waits(record, result)
    found = [dict.fromkeys(IdleReason, 0.0) for _ in range(graph.shape.stages)]
    last: dict[str, tuple[float, int]] = {
        graph.devices[device]: (result.began, stage)
        for stage, device in reversed(list(enumerate(graph.placement)))
        if graph.devices[device] in graph.own_devices
    }
    for time in result.tasks:
        if time.task.lane.queue is Queue.COMPUTE:
            for reason, seconds in waited[time.task.number].idle.items():
                found[time.task.stage][reason] += seconds
            device = time.task.lane.device
            last[device] = max(time.end, last[device][0]), time.task.stage
    for end, stage in last.values():
        found[stage][IdleReason.DRAIN] += result.end - end
    return found


class _Inputs:
    """When the inputs of tasks were where, and when the lane of each task was free before it."""

    def __init__(self, record: StepRecord, result: Report, earlier: Mapping[Lane, float]) -> None:
        self._graph, self._result = record.graph, result
        self._times = {time.task.number: time for time in result.tasks}
        self._free: dict[int, float] = {}
        ended = dict(earlier)
        for time in result.tasks:
            lane = time.task.lane
            self._free[time.task.number] = free = ended.get(lane, result.began)
            ended[lane] = max(time.end, free)

    def gap(self, time: TaskTime) -> DividedGap:
        """The gap before a task, not yet divided."""
        number, began = time.task.number, self._result.began
        reads = self._reads(number)
        came = self._result.arrived.get(number, began)
        made, landed, left = began, came, began
        for read in reads:
            copied = self._copied(read)
            made, landed, left = max(made, copied[0]), max(landed, copied[1]), max(left, copied[2])
        opened = self._result.gates_opened.get(number, began)
        there = max([came, opened, *(read.end for read in reads)])
        free = self._free[number]
        begins = min(max(time.start, free), max(time.end, free))
        return DividedGap(free, max(made, opened), landed, max(left, landed), there, begins)

    def candidates(self, time: TaskTime, before: tuple[float, str] | None) -> Iterator[tuple[str, float]]:
        """What ``time`` may have waited for, and when that ended; of those that ended last, the first counts."""
        number = time.task.number
        reads = [self._producer(read) for read in self._reads(number)]
        if number in self._result.arrived:
            sent = max(reads, key=lambda read: read.end, default=None)
            name = "another worker" if sent is None else f"{sent.task.id} of another worker, on its way"
            yield name, self._result.arrived[number]
        if number in self._result.gates_opened:
            yield "the caller's gradient", self._result.gates_opened[number]
        # An input explains the time better than the task before on the same lane.
        for read in sorted(reads, key=lambda read: read.task.lane == time.task.lane):
            yield read.task.id, read.end
        if before is not None:
            yield before[1], before[0]

    def _reads(self, number: int) -> list[TaskTime]:
        return [self._times[read] for read in self._graph.read_by(number) if read in self._times]

    def _copied(self, read: TaskTime) -> tuple[float, float, float]:
        """When an input was made, landed in its worker, and was taken by its copy; all the same without a copy."""
        if read.task.kind not in COPY_KINDS:
            return read.end, read.end, read.end
        number = read.task.number
        made = max((each.end for each in self._reads(number)), default=self._result.began)
        landed = max(made, self._result.arrived.get(number, made))
        return made, landed, read.start - max(self._free[number] - landed, 0.0)

    def _producer(self, read: TaskTime) -> TaskTime:
        """``read``, or what it copies if it is a copy without cost, which pictures do not show."""
        if read.task.kind is not TaskKind.COPY or read.seconds > 0:
            return read
        return max(self._reads(read.task.number), key=lambda time: time.end, default=read)


def _shared(record: StepRecord, result: Report, lane: Lane, gap: DividedGap) -> float:
    """The seconds in which others had the device while a task, or a copy for it, waited for its dispatch.

    What computes waits for the lane that computes, and copies for any: on a CPU one thread serves all lanes.
    """
    shared = [0.0, 0.0]
    for taken, account in record.notes.taken.items():
        if taken.device == lane.device:
            shared[0] += _within(account, gap.landed + result.origin, gap.left + result.origin)
            if taken.queue is Queue.COMPUTE:
                shared[1] += _within(account, gap.there + result.origin, gap.begins + result.origin)
    # Lanes may have been taken at the same time.
    both: float = min(shared[0], gap.left - gap.landed) + min(shared[1], gap.begins - gap.there)
    return both


def _within(account: Taken, since: float, until: float) -> float:
    return _total(account, until) - _total(account, since)


def _total(account: Taken, at: float) -> float:
    """How long others had had the lane until ``at``: a straight line between two points of the account."""
    after = bisect_right(account, at, key=lambda point: point[0])
    if after in (0, len(account)):
        return account[max(after - 1, 0)][1]
    (start, before), (end, total) = account[after - 1], account[after]
    return before + (total - before) * (at - start) / (end - start)


def _by_time(candidate: tuple[str, float]) -> float:
    return candidate[1]
