"""A task graph as a picture: a column for each clock cycle, a row for each stage, an arrow for each dependency."""

from __future__ import annotations

from asyncpipe.core.graph.lower import CheckpointMode, lower
from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import Reason, TaskGraph
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from website.pictures.drawing import Drawing

__all__ = ["figure_2"]

COLUMN, ROW, WIDTH, HEIGHT, LEFT, TOP = 56, 92, 34, 26, 60, 66


def figure_2() -> str:
    """Figure 2 of the torchgpipe paper: GPipe, 4 micro-batches, 3 stages, all but the last recomputed."""
    graph = lower(
        find_schedule("gpipe"), Shape(stages=3, microbatches=4, devices=3), checkpoint=CheckpointMode.EXCEPT_LAST
    )
    columns = _columns(graph)
    width = LEFT + (max(columns.values()) + 1) * COLUMN + 12
    drawing = Drawing(width, TOP + 3 * ROW, "The task graph of a step of GPipe with 4 micro-batches on 3 devices")
    for number, (kind, words) in enumerate(_legend()):
        drawing.box(12 + number * 128, 10, 22, 18, kind.value, kind.colour)
        drawing.text(40 + number * 128, 24, words, anchor="start")
    for number, (words, is_order) in enumerate((("data; C is a copy", False), ("order", True))):
        drawing.arrow((400 + number * 170, 19), (440 + number * 170, 19), dashed=is_order)
        drawing.text(448 + number * 170, 24, words, anchor="start")
    for stage in range(graph.shape.stages):
        drawing.text(10, TOP + stage * ROW + HEIGHT / 2 + 4, f"dev:{stage}", anchor="start")
    _dependencies(drawing, graph, columns)
    for task in graph.tasks:
        if task.kind is not TaskKind.COPY:
            x, y = _place(task, columns)
            drawing.box(x, y, WIDTH, HEIGHT, task.label, task.kind.colour)
    return drawing.svg()


def _legend() -> list[tuple[TaskKind, str]]:
    return [(kind, kind.word) for kind in (TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD)]


def _columns(graph: TaskGraph) -> dict[int, int]:
    """When each task begins if every one takes a cycle, and copies none."""
    times = report(simulate(graph, Costs(forward=1, backward=1, recompute=1))).tasks
    return {time.task.number: round(time.start) for time in times}


def _place(task: Task, columns: dict[int, int]) -> tuple[float, float]:
    return LEFT + columns[task.number] * COLUMN, TOP + task.stage * ROW


def _dependencies(drawing: Drawing, graph: TaskGraph, columns: dict[int, int]) -> None:
    """Arrows between compute tasks; a copy is the arrow from its producer to its consumer, with the letter C."""
    for edge in graph.edges():
        before, task = graph.tasks[edge.dependency], graph.tasks[edge.task]
        if task.kind is TaskKind.COPY:
            continue
        if before.kind is TaskKind.COPY:
            (x, y), (to_x, to_y) = _place(graph.tasks[graph.read_by(before.number)[0]], columns), _place(task, columns)
            down = to_y > y
            start = (x + WIDTH - 6, y + (HEIGHT if down else 0))
            end = (to_x + 6, to_y + (0 if down else HEIGHT))
            drawing.arrow(start, end)
            drawing.text((start[0] + end[0]) / 2 + 9, (start[1] + end[1]) / 2 + 4, "C")
            continue
        (x, y), (to_x, to_y) = _place(before, columns), _place(task, columns)
        is_order = edge.reason is Reason.ORDER
        if columns[task.number] - columns[before.number] == 1:
            drawing.arrow((x + WIDTH, y + HEIGHT / 2), (to_x, to_y + HEIGHT / 2), dashed=is_order)
        else:
            high, middle = y - 14, WIDTH / 2
            path = ((x + middle + 5, y), (x + middle + 5, high), (to_x + middle - 5, high), (to_x + middle - 5, to_y))
            drawing.arrow(*path, dashed=is_order)
