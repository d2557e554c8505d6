"""The timeline of one step as an SVG picture: self-contained, no script, readable on light and dark pages.

Each device is a row of tasks with its copies as thin bars below; arrows show what travels between devices::

    dev:0  [F0][F1]··········[ B1 ][ B0 ]
             ╲                ↗
    dev:1  ···[F0][F1][ B1 ][ B0 ]·······
           ▔▔
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count, takewhile

from asyncpipe.core.events import StepRecord
from asyncpipe.core.graph import TaskGraph
from asyncpipe.core.report import Report, TaskTime, report
from asyncpipe.core.task import Queue, TaskKind
from asyncpipe.observe.timeline import Row, format_time, labels, lane_rows, quantum, summary, tick_step

__all__ = ["svg_timeline"]

COLOURS = {
    TaskKind.FORWARD: "#7fb3d5",
    TaskKind.RECOMPUTE: "#f7dc6f",
    TaskKind.BACKWARD: "#82c99b",
    TaskKind.INPUT_GRADIENT: "#a3d9b1",
    TaskKind.WEIGHT_GRADIENT: "#c3aed6",
    TaskKind.COPY: "#9aa5b1",
    TaskKind.UPDATE: "#f0a58f",
    TaskKind.SUM: "#c39bd3",
}
NAMES = {
    TaskKind.FORWARD: "forward",
    TaskKind.RECOMPUTE: "recompute",
    TaskKind.BACKWARD: "backward",
    TaskKind.INPUT_GRADIENT: "input gradient",
    TaskKind.WEIGHT_GRADIENT: "weight gradient",
    TaskKind.COPY: "copy",
    TaskKind.UPDATE: "update",
    TaskKind.SUM: "sum",
}
TEXT = "#6e7781"
"""A grey with enough contrast on white and on GitHub's dark background; the page's scheme cannot be asked for."""
INK = "#16212c"
CHARACTER, ROW, BAR, GAP, TOP = 7.0, 26.0, 5.0, 12.0, 40.0
"""Pixels: width of a label's character, heights of a compute row and a copy bar, space below a row and above all."""
NARROWEST, WIDEST = 640.0, 1600.0
MOST_ARROWS = 64
"""With more copies than this the arrows would hide what they explain."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where things are, in pixels."""

    left: float
    per_second: float
    width: float
    top: dict[str, float]
    """Of each device's compute row."""
    bottom: float
    """Of the lowest row."""

    def x(self, seconds: float) -> float:
        return self.left + seconds * self.per_second


def svg_timeline(record: StepRecord, *, title: str = "", virtual: bool = False, arrows: bool | None = None) -> str:
    """The step as an SVG document: a row a device, copies below it, a legend, a time axis and the key figures.

    ``title`` stands above it. ``virtual`` times are printed as bare numbers, others as seconds. ``arrows``
    between devices are drawn in small graphs, unless the caller says ``True`` or ``False``. Hovering over a
    task shows its id and its times.
    """
    result = report(record)
    rows = lane_rows(result, record.graph, copies=True)
    layout = _layout(result, record.graph, rows)
    figures = summary(result, training=record.graph.training, virtual=virtual)
    copies = sum(task.kind is TaskKind.COPY for task in record.graph.tasks)
    if arrows is None:
        arrows = copies <= MOST_ARROWS
    right, bottom = layout.left + layout.width + 24, layout.bottom + 52
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(right)} {_n(bottom)}" width="{_n(right)}" '
        f'height="{_n(bottom)}" font-family="ui-monospace, SFMono-Regular, Menlo, DejaVu Sans Mono, monospace" '
        f'font-size="11" fill="{TEXT}" role="img">',
        f"<title>{escape(title or record.graph.schedule)}</title>",
        f'<defs><marker id="head" viewBox="0 0 6 6" refX="5.5" refY="3" markerWidth="5" markerHeight="5" '
        f'orient="auto"><path d="M0 0 6 3 0 6z" fill="{TEXT}"/></marker></defs>',
        *_heading(title or record.graph.schedule, result, layout.left + layout.width),
        *_lanes(layout),
        *(_arrows(record.graph, result, layout) if arrows else ()),
        *_tasks(record.graph, rows, layout, virtual=virtual),
        *_axis(result, layout, virtual=virtual),
        f'<text x="{_n(layout.left)}" y="{_n(layout.bottom + 42)}">{figures}</text>',
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _n(pixels: float) -> str:
    """A hundredth of a pixel is enough, and half of the file's size."""
    return f"{pixels:.2f}".rstrip("0").rstrip(".")


def _layout(result: Report, graph: TaskGraph, rows: Sequence[Row]) -> _Layout:
    left = CHARACTER * max(len(device) for device in graph.devices) + 16
    unit = quantum([time for row in rows for time in row.times])
    width = 1000.0
    if unit is not None:
        label = labels(graph)
        compute = [time for row in rows for time in row.times if row.lane.queue is Queue.COMPUTE]
        wanted = max(((len(label(t.task)) * CHARACTER + 6) / t.seconds for t in compute), default=0.0)
        width = min(max(result.seconds * wanted, NARROWEST), WIDEST)
    copies = any(row.times for row in rows if row.lane.queue is not Queue.COMPUTE)
    height = ROW + (2 * (BAR + 1) + 1 if copies else 0) + GAP
    top = {device: TOP + number * height for number, device in enumerate(graph.devices)}
    per_second = width / result.seconds if result.seconds else 0.0
    return _Layout(left, per_second, width, top, TOP + len(top) * height - GAP)


def _heading(title: str, result: Report, right: float) -> Iterator[str]:
    """The title on the left, the legend of the kinds that ran on the right."""
    yield f'<text x="8" y="16" font-size="12" font-weight="bold">{escape(title)}</text>'
    ran = {time.task.kind for time in result.tasks if time.seconds > 0}
    x = right
    for kind in [kind for kind in reversed(TaskKind) if kind in ran]:
        x -= len(NAMES[kind]) * CHARACTER + 26
        yield f'<rect x="{_n(x)}" y="20" width="11" height="11" rx="2" fill="{COLOURS[kind]}"/>'
        yield f'<text x="{_n(x + 15)}" y="29.5">{NAMES[kind]}</text>'


def _lanes(layout: _Layout) -> Iterator[str]:
    for device, top in layout.top.items():
        yield f'<text x="8" y="{_n(top + ROW / 2 + 4)}">{escape(device)}</text>'
        yield (
            f'<rect x="{_n(layout.left)}" y="{_n(top)}" width="{_n(layout.width)}" height="{_n(ROW)}" '
            f'fill="{TEXT}" fill-opacity="0.12"/>'
        )


def _tasks(graph: TaskGraph, rows: Sequence[Row], layout: _Layout, *, virtual: bool) -> Iterator[str]:
    label = labels(graph)
    longest = max((time.end for row in rows for time in row.times), default=0.0)
    for row in rows:
        top, height = _band(row, layout)
        for time in row.times:
            x, width = layout.x(time.start), time.seconds * layout.per_second
            start, end = (format_time(edge, longest, virtual=virtual) for edge in (time.start, time.end))
            yield (
                f"<g><title>{escape(f'{time.task.id}: {start} to {end} on {row.lane}')}</title>"
                f'<rect x="{_n(x)}" y="{_n(top)}" width="{_n(max(width - 0.8, 0.3))}" height="{_n(height)}" '
                f'rx="{1.5 if width > 6 else 0}" fill="{COLOURS[time.task.kind]}"/>'
                + _label(label(time.task), x, top, width, height)
                + "</g>"
            )


def _band(row: Row, layout: _Layout) -> tuple[float, float]:
    """Top and height of a lane: the compute row, or one of the bars below it."""
    top = layout.top[row.lane.device]
    if row.lane.queue is Queue.COMPUTE:
        return top, ROW
    return top + ROW + 2 + (BAR + 1) * (row.lane.queue is Queue.GRAD_IN), BAR


def _label(text: str, x: float, top: float, width: float, height: float) -> str:
    if height < ROW or len(text) * CHARACTER > width:
        return ""
    return (
        f'<text x="{_n(x + (width - 0.8) / 2)}" y="{_n(top + height / 2 + 4)}" text-anchor="middle" '
        f'fill="{INK}">{text}</text>'
    )


def _arrows(graph: TaskGraph, result: Report, layout: _Layout) -> Iterator[str]:
    """From the end of what a copy reads to the start of what reads the copy; drawn below the tasks."""
    times = {time.task.number: time for time in result.tasks}
    for consumer in result.tasks:
        for dependency in graph.dependencies[consumer.task.number]:
            for producer in graph.dependencies[dependency]:
                if graph.tasks[dependency].kind is TaskKind.COPY and producer in times:
                    yield _arrow(times[producer], consumer, layout)


def _arrow(producer: TaskTime, consumer: TaskTime, layout: _Layout) -> str:
    above, below = (layout.top[time.task.lane.device] for time in (producer, consumer))
    down = above < below
    # Two pixels inside the tasks, so that the border between two neighbours does not hide which is meant.
    x, y = layout.x(producer.end) - 3, above + (ROW if down else 0)
    to_x, to_y = layout.x(consumer.start) + 3, below + (0 if down else ROW)
    middle = (y + to_y) / 2
    return (
        f'<path d="M{_n(x)} {_n(y)}C{_n(x)} {_n(middle)} {_n(to_x)} {_n(middle)} {_n(to_x)} {_n(to_y)}" '
        f'fill="none" stroke="{TEXT}" stroke-opacity="0.7" marker-end="url(#head)"/>'
    )


def _axis(result: Report, layout: _Layout, *, virtual: bool) -> Iterator[str]:
    y = layout.bottom + 8
    yield f'<path d="M{_n(layout.left)} {_n(y)}h{_n(layout.width)}" stroke="{TEXT}" fill="none"/>'
    if not result.seconds:
        return
    widest = (len(format_time(result.seconds * 0.999, result.seconds, virtual=virtual)) + 3) * CHARACTER
    step = tick_step(widest / layout.per_second)
    if virtual and widest / layout.per_second <= 1:
        step = 1.0
    for at in takewhile(lambda at: at <= result.seconds * (1 + 1e-9), (tick * step for tick in count())):
        yield f'<path d="M{_n(layout.x(at))} {_n(y)}v4" stroke="{TEXT}"/>'
        text = format_time(at, result.seconds, virtual=virtual)
        yield f'<text x="{_n(layout.x(at))}" y="{_n(y + 16)}" text-anchor="middle">{text}</text>'
