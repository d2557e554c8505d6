"""Why devices stood idle: a fold that splits every gap of a compute lane by what the next task waited for.

The copies that a task reads cut the gap before it into three::

    before ends      producer ends     copy ends        task starts
    ─────┤                 ┊               ┊                 ├─────
         │◀─ dependency ──▶│◀──── copy ───▶│◀── dispatch ───▶│

What is left after a device's last task is the drain. Busy and idle seconds of a device add up to the step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum

from asyncpipe.core.graph import TaskGraph
from asyncpipe.core.report import Report, TaskTime
from asyncpipe.core.task import Queue, TaskKind

__all__ = ["IdleReason", "Usage", "usage"]


class IdleReason(StrEnum):
    """What a compute lane waited for."""

    DEPENDENCY = "dependency"
    """Another device, or the caller's own part of a backward, had not yet computed what the next task reads."""
    COPY = "copy"
    """It was computed and on its way."""
    DISPATCH = "dispatch"
    """Everything was there, and the task had not begun."""
    DRAIN = "drain"
    """The device had nothing left to do in this step."""


@dataclass(slots=True)
class Usage:
    """Seconds of the devices' compute lanes, by (stage, device) and by (stage, device, reason).

    A gap counts for the stage of the task that ends it, the drain for the stage of the last task.
    """

    busy: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    idle: dict[tuple[int, str, IdleReason], float] = field(default_factory=lambda: defaultdict(float))


def usage(result: Report, graph: TaskGraph) -> Usage:
    """Where the devices' time went in the step that ``result`` reports; ``graph`` is the one that it ran."""
    found = Usage()
    times = {time.task.number: time for time in result.tasks}
    ran: dict[str, list[TaskTime]] = {device: [] for device in graph.devices}
    for time in result.tasks:
        if time.task.lane.queue is Queue.COMPUTE:
            ran[time.task.lane.device].append(time)
    for number, device in enumerate(graph.devices):
        # Clocks of other threads and devices may be a little off: tasks that seem to overlap are counted once.
        cursor, stage = 0.0, next((s for s, at in enumerate(graph.placement) if at == number), 0)
        for time in ran[device]:
            stage = time.task.stage
            start, end = max(time.start, cursor), max(time.end, cursor)
            if start > cursor:
                _split_gap(found, time, cursor, start, graph, times, result.gates_opened)
            found.busy[stage, device] += end - start
            cursor = end
        found.idle[stage, device, IdleReason.DRAIN] += result.seconds - cursor
    return found


def _split_gap(
    found: Usage,
    time: TaskTime,
    begin: float,
    end: float,
    graph: TaskGraph,
    times: dict[int, TaskTime],
    gates_opened: dict[int, float],
) -> None:
    """Divide the idle time from ``begin`` to ``end``, where ``time.task`` starts, among the reasons."""
    produced = arrived = max(begin, gates_opened.get(time.task.number, begin))
    for number in graph.dependencies[time.task.number]:
        if number not in times:
            continue
        dependency = times[number]
        arrived = max(arrived, dependency.end)
        if dependency.task.kind is TaskKind.COPY:
            produced = max([produced, *(times[p].end for p in graph.dependencies[number] if p in times)])
        else:
            produced = max(produced, dependency.end)
    produced, arrived = min(produced, end), min(arrived, end)
    for reason, seconds in (
        (IdleReason.DEPENDENCY, produced - begin),
        (IdleReason.COPY, arrived - produced),
        (IdleReason.DISPATCH, end - arrived),
    ):
        found.idle[time.task.stage, time.task.lane.device, reason] += seconds
