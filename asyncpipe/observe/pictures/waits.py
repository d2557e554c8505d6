"""What each task of a step waited for; pictures show it when the pointer is on a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.report import Report, TaskTime

__all__ = ["Wait", "waits"]


class Wait(NamedTuple):
    """The last thing that a task waited for: an input, its way here, the task before it on its lane, or another job."""

    name: str
    until: float
    """When that ended, in seconds since the step was submitted."""
    idle: float
    """Seconds that the lane was idle before the task."""


def waits(result: Report, graph: TaskGraph, earlier: Mapping[Lane, float] | None = None) -> dict[int, Wait]:
    """What each task waited for, by task number. Tasks that waited for nothing, such as the first one, are left out.

    ``earlier`` says when each lane was at the end of the steps before, if there are any in the picture.
    """
    earlier = earlier or {}
    times = {time.task.number: time for time in result.tasks}
    before: dict[Lane, TaskTime] = {}
    found: dict[int, Wait] = {}
    for time in result.tasks:
        number, lane = time.task.number, time.task.lane
        reads = [_producer(times[read], times, graph) for read in graph.dependencies[number] if read in times]
        candidates = [(read.end, read is not before.get(lane), read.task.id) for read in reads]
        if lane in before:
            candidates.append((before[lane].end, False, before[lane].task.id))
        elif lane in earlier:
            candidates.append((earlier[lane], False, "the step before"))
        if number in result.gates_opened:
            candidates.append((result.gates_opened[number], True, "the caller's gradient"))
        if number in result.arrived:
            sent = max(reads, key=lambda read: read.end, default=None)
            name = "another worker" if sent is None else f"{sent.task.id} of another worker, on its way"
            candidates.append((result.arrived[number], True, name))
        if candidates and lane.queue is Queue.COMPUTE:
            ready = max(candidates)[0]
            taken = [min(over, time.start) for begin, over in result.taken.get(lane.device, ()) if begin < time.start]
            # What is there for less than that, is there while the scheduler answers.
            if taken and ready < taken[-1] > time.start - (time.start - ready) / 2:
                candidates.append((taken[-1], True, "another job, which had the device"))
        if candidates:
            end, _, name = max(candidates)
            free = before[lane].end if lane in before else earlier.get(lane, 0.0)
            found[number] = Wait(name, end, max(time.start - free, 0.0))
        if time.seconds > 0:
            before[lane] = time
    return found


def _producer(read: TaskTime, times: dict[int, TaskTime], graph: TaskGraph) -> TaskTime:
    """``read``, or the producer that it copies from if it is a copy without cost, which pictures do not show."""
    if read.task.kind is not TaskKind.COPY or read.seconds > 0:
        return read
    producers = [times[number] for number in graph.read_by(read.task.number) if number in times]
    return max(producers, key=lambda time: time.end, default=read)
