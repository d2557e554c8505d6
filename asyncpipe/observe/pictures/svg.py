"""The timeline of one step, or of several, as an SVG picture without script, readable on light and dark pages.

Each device is a row of tasks with its copies and reductions as thin bars below; the name of a replica stands above its
devices. A darker band stands where another job had the device::

    dev:0  [F0][F1]··········[ B1 ][ B0 ]
    dev:1  ···[F0][F1][ B1 ][ B0 ]·······
           ▔▔

Every picture has the same width. Pictures that are to be compared are given the same time for it. Several steps in one
picture share its axis; a line stands on each device where it begins the next step.

This file computes what stands where; the markup is the template ``timeline.svg``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.idle_reasons import Wait, waits
from asyncpipe.core.predict.report import Report, TaskTime, reports
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.observe.pictures.templates import rendered
from asyncpipe.observe.pictures.timeline import (
    borders,
    common_devices,
    format_time,
    kinds_of,
    labels,
    lane_rows,
    replica_labels,
    shade,
    summary,
    ticks,
)

__all__ = ["svg_timeline"]

CHARACTER, TITLE_CHARACTER, ROW, BAR, GAP, TOP, LABEL = 7.0, 7.4, 26.0, 5.0, 12.0, 40.0, 16.0
"""Pixels: the widths of a character of a label and of a title, the heights of a compute row and of a copy bar, the
space below a row and above the first, and the height of the name of a replica."""
WIDTH = 1000.0
"""Pixels from time 0 to the end of the axis."""


@dataclass(frozen=True, slots=True)
class _ShownStep:
    """A step in a picture; times count from the submission of the picture's first step."""

    graph: TaskGraph
    result: Report
    rows: Mapping[Lane, Sequence[TaskTime]]
    waited: Mapping[int, Wait]
    """What each task waited for, by its number."""
    name: str
    """Nothing, where the picture has one step."""


@dataclass(frozen=True, slots=True)
class _Box:
    """A drawn task, or a time in which another job had the device; in pixels."""

    x: float
    y: float
    width: float
    height: float
    story: str
    """What hovering over it shows."""
    colour: str = ""
    label: str = ""


class _Layout:
    """The scale and the vertical positions, in pixels, and how times are printed."""

    def __init__(self, steps: Sequence[_ShownStep], seconds: float | None, top: float, *, virtual: bool) -> None:
        devices = steps[0].graph.devices
        self.virtual, self.longest = virtual, max(step.result.end for step in steps)
        self.seconds = self.longest if seconds is None else seconds
        self.per_second = WIDTH / self.seconds if self.seconds else 0.0
        self.left = CHARACTER * max(map(len, devices)) + 16
        """Before time 0 are the names of the devices."""
        self.right = self.left + WIDTH
        shown = {lane.queue for step in steps for lane in step.rows} - {Queue.COMPUTE}
        self.bars = {queue: bar for bar, queue in enumerate(queue for queue in Queue if queue in shown)}
        """The bar below the compute row that each queue has."""
        height = ROW + (len(shown) * (BAR + 1) + 1 if shown else 0) + GAP
        labels = replica_labels(steps[0].graph)
        self.top: dict[str, float] = {}
        """The top of each device's compute row."""
        self.replicas: list[tuple[float, str]] = []
        """The line that the name of each replica stands on, and the name."""
        for device in devices:
            if device in labels:
                self.replicas.append((top + LABEL - 5, labels[device]))
                top += LABEL
            self.top[device] = top
            top += height
        self.bottom = top - GAP
        """The bottom of the lowest row."""

    def x(self, seconds: float) -> float:
        return self.left + seconds * self.per_second

    def shown(self, seconds: float) -> str:
        return format_time(seconds, self.longest, virtual=self.virtual)


def svg_timeline(
    record: StepRecord | Sequence[StepRecord],
    *,
    title: str = "",
    virtual: bool = False,
    seconds: float | None = None,
    inline: bool = False,
) -> str:
    """The step as an SVG document: a row a device, copies below it, a legend, a time axis and the key figures.

    Several steps, in the order of their submissions, are drawn on one axis; a line stands where a device begins the
    next, and hovering over a task names its step.
    ``virtual`` times are printed as bare numbers, others with units. Hovering over a task shows its id, its times and
    what it waited for. If a device has several stages, later ones are paler. The axis ends at ``seconds``, by default
    with the picture's last task. ``inline`` leaves out title, legend and key figures, for a picture in a page.
    """
    records = [record] if isinstance(record, StepRecord) else record
    common_devices(records)
    steps = _shown_steps(records)
    graph = steps[0].graph
    layout = _Layout(steps, seconds, 4.0 if inline else TOP, virtual=virtual)
    kinds = kinds_of(time for step in steps for time in chain.from_iterable(step.rows.values()))
    return rendered(
        "timeline.svg",
        layout=layout,
        title=title or graph.schedule,
        inline=inline,
        row=ROW,
        right=max(layout.right, 8 + TITLE_CHARACTER * len(title)) + 24,
        bottom=layout.bottom + (28 if inline else 52),
        legend=[] if inline else list(_legend(kinds, layout.right)),
        figures=summary([step.result for step in steps], training=graph.training, virtual=virtual),
        lane_width=layout.longest * layout.per_second if layout.longest else WIDTH,
        taken=[box for step in steps for box in _taken(step, layout)],
        tasks=[box for step in steps for box in _tasks(step, layout)],
        borders=[
            (layout.x(start), layout.top[lane.device])
            for lane, starts in borders([step.rows for step in steps]).items()
            for start in starts
            if lane.queue is Queue.COMPUTE
        ],
        ticks=[(layout.x(at), text) for at, text in _ticks(layout)],
    )


def _shown_steps(records: Sequence[StepRecord]) -> list[_ShownStep]:
    earlier: dict[Lane, float] = {}
    shown = []
    for record, result in zip(records, reports(records), strict=True):
        rows = lane_rows(result, record.graph, copies=True)
        name = f"step {record.step}, " if len(records) > 1 else ""
        shown.append(_ShownStep(record.graph, result, rows, waits(record, result, earlier), name))
        earlier |= {lane: times[-1].end for lane, times in rows.items() if times}
    return shown


def _legend(kinds: Sequence[TaskKind], right: float) -> Iterator[tuple[float, TaskKind]]:
    """Where each kind stands in the legend, which ends at ``right``."""
    for kind in reversed(kinds):
        right -= len(kind.word) * CHARACTER + 26
        yield right, kind


def _taken(step: _ShownStep, layout: _Layout) -> Iterator[_Box]:
    """Where another job had the device and the step computed nothing there."""
    for device, spans in step.result.taken.items():
        for start, end in spans:
            story = f"{step.name}another job had {device}: {layout.shown(start)} to {layout.shown(end)}"
            yield _Box(layout.x(start), layout.top[device], (end - start) * layout.per_second, ROW, story)


def _tasks(step: _ShownStep, layout: _Layout) -> Iterator[_Box]:
    graph = step.graph
    label = labels(graph)
    mates = {device: [stage for stage, at in enumerate(graph.placement) if at == device] for device in graph.placement}
    for lane, times in step.rows.items():
        top, height = layout.top[lane.device], ROW
        if lane.queue is not Queue.COMPUTE:
            top, height = top + ROW + 2 + (BAR + 1) * layout.bars[lane.queue], BAR
        for time in times:
            width = time.seconds * layout.per_second
            stages = mates[graph.placement[time.task.stage]]
            colour = shade(time.task.kind, stages.index(time.task.stage), len(stages))
            text = label(time.task)
            fits = height == ROW and len(text) * CHARACTER <= width
            story = step.name + _story(time, step.waited[time.task.number], layout)
            yield _Box(layout.x(time.start), top, width, height, story, colour, text if fits else "")


def _story(time: TaskTime, waited: Wait, layout: _Layout) -> str:
    """The text that hovering over a task shows: when it ran, and what it waited for."""
    text = f"{time.task.id}: {layout.shown(time.start)} to {layout.shown(time.end)} on {time.task.lane}"
    if not waited.name:
        return text
    text += f"\nwaited for {waited.name} until {layout.shown(waited.until)}"
    queue = "device" if time.task.lane.queue is Queue.COMPUTE else time.task.lane.queue.value
    idle = sum(waited.idle.values())
    return text if idle <= layout.longest * 1e-9 else f"{text}, {queue} idle for {layout.shown(idle)}"


def _ticks(layout: _Layout) -> Iterator[tuple[float, str]]:
    if layout.seconds:
        yield from ticks(layout.seconds, CHARACTER / layout.per_second, 3, virtual=layout.virtual)
