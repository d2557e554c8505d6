"""A task graph as text for other programs: JSON, Graphviz, and the CSV notation of torch.distributed.pipelining."""

from __future__ import annotations

import csv
from io import StringIO
from typing import Any

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import Reason, TaskGraph
from asyncpipe.core.kinds import SCHEDULED_KINDS
from asyncpipe.core.schedules.csv_notation import format_cell
from asyncpipe.core.schedules.protocol import Action, OrderedSchedule, Schedule, Shape, flat
from asyncpipe.errors import ScheduleError

__all__ = ["to_dict", "to_dot", "write_csv"]


def to_dict(graph: TaskGraph) -> dict[str, list[dict[str, Any]]]:
    """The graph as plain data: ``{"tasks": [...], "edges": [...]}``, ready for ``json.dumps``."""
    return {
        "tasks": [_task_row(task) for task in graph.tasks],
        "edges": [
            {"from": graph.tasks[e.dependency].id, "to": graph.tasks[e.task].id, "reason": e.reason.value}
            for e in graph.edges()
        ],
    }


def _task_row(task: Task) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": task.id,
        "kind": task.kind.value,
        "microbatch": task.microbatch,
        "stage": task.stage,
        "device": task.lane.device,
        "lane": str(task.lane),
        "cycle": task.cycle,
    }
    if task.source is not None:
        row |= {"src": task.source, "dst": task.stage}
    return row


_DOT_STYLES = {Reason.DATA: "solid", Reason.COPY: "solid", Reason.RECOMPUTE: "bold", Reason.ORDER: "dashed"}


def to_dot(graph: TaskGraph) -> str:
    """The graph in Graphviz's language: a cluster for each device, dashed order edges."""
    lines = ["digraph step {", "  rankdir=LR;", '  node [shape=box, style=filled, fontname="sans-serif"];']
    for number, device in enumerate(graph.devices):
        tasks = (task for task in graph.tasks if task.lane.device == device)
        nodes = (f'    "{task.id}" [fillcolor="{task.kind.colour}"];' for task in tasks)
        lines += [f"  subgraph cluster_{number} {{", f'    label="{device}";', *nodes, "  }"]
    for edge in graph.edges():
        ends = f'"{graph.tasks[edge.dependency].id}" -> "{graph.tasks[edge.task].id}"'
        lines.append(f'  {ends} [style={_DOT_STYLES[edge.reason]}, tooltip="{edge.reason.value}"];')
    return "\n".join([*lines, "}"]) + "\n"


def write_csv(schedule: Schedule, shape: Shape) -> str:
    """The CSV text of ``schedule``: a row for each device, a column for each clock cycle; lines end in a newline.

    The columns are the cycles of the lowered graph, in which every action takes one cycle, so an action is to the
    right of everything that it waits for. An Overlap is one cell, in the cycle of its forward; the cycles in which
    its backward waits or runs are empty. Raises ``ScheduleError`` if the schedule cannot be lowered for ``shape``, or
    has what the notation cannot express: a rule, an Overlap of anything but a forward and a backward (B or I), or a
    device without a stage.
    """
    if not isinstance(schedule, OrderedSchedule):
        raise ScheduleError(f"schedule {schedule.name!r} decides by a rule; only an ordered schedule has a CSV form")
    graph = lower(schedule, shape)
    cycles = {Action(*task[1:4]): task.cycle for task in graph.tasks if task.kind in SCHEDULED_KINDS}
    columns = 1 + max(cycles.values())
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for device in range(shape.devices):
        row = [""] * columns
        for entry in schedule.order(device, shape):
            row[cycles[next(flat([entry]))]] = format_cell(entry, f"schedule {schedule.name!r}, device {device}")
        if not any(row):
            raise ScheduleError(
                f"schedule {schedule.name!r} places no stage on device {device}; in the CSV form each row is a device "
                "with at least one stage; give fewer devices"
            )
        writer.writerow(row)
    return text.getvalue()
