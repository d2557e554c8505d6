"""What each task of a step waited for: a fold that pictures show where a task is pointed at."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.report import Report, TaskTime

__all__ = ["Wait", "waits"]


@dataclass(frozen=True, slots=True)
class Wait:
    """What a task waited for last: what it reads, or the task before it on its own lane."""

    name: str
    until: float
    """When that ended, in seconds since the step was submitted."""
    idle: float
    """Seconds that the lane stood idle before the task."""
    queue: str
    """What to call the lane: the device, or a queue of it."""


def waits(result: Report, graph: TaskGraph) -> dict[int, Wait]:
    """By number of task, what it waited for; tasks that waited for nothing, such as the first one, have none."""
    times = {time.task.number: time for time in result.tasks}
    before: dict[Lane, TaskTime] = {}
    found: dict[int, Wait] = {}
    for time in result.tasks:
        number, lane = time.task.number, time.task.lane
        reads = [_maker(times[read], times, graph) for read in graph.dependencies[number] if read in times]
        candidates = [(read.end, read is not before.get(lane), read.task.id) for read in reads]
        if lane in before:
            candidates.append((before[lane].end, False, before[lane].task.id))
        if number in result.gates_opened:
            candidates.append((result.gates_opened[number], True, "the caller's gradient"))
        if candidates:
            end, _, name = max(candidates)
            free = before[lane].end if lane in before else 0.0
            queue = "device" if lane.queue is Queue.COMPUTE else lane.queue.value
            found[number] = Wait(name, end, max(time.start - free, 0.0), queue)
        if time.seconds > 0:
            before[lane] = time
    return found


def _maker(read: TaskTime, times: dict[int, TaskTime], graph: TaskGraph) -> TaskTime:
    """``read``, or what a copy without any cost copied: nobody sees such a copy in a picture."""
    if read.task.kind is not TaskKind.COPY or read.seconds > 0:
        return read
    makers = [times[number] for number in graph.dependencies[read.task.number] if number in times]
    return max(makers, key=lambda time: time.end, default=read)
