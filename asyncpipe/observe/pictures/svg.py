"""The timeline of one step, or of several, as an SVG picture without script, readable on light and dark pages.

Each device is a row of tasks with its copies as thin bars below. A darker band stands where another job had the
device::

    dev:0  [F0][F1]··········[ B1 ][ B0 ]
    dev:1  ···[F0][F1][ B1 ][ B0 ]·······
           ▔▔

Pictures that are to be compared share a scale: a second has the same width in each of them. Several steps in one
picture share its axis; a line stands on each device where it begins the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain

from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.idle_reasons import Wait, waits
from asyncpipe.core.predict.report import Report, TaskTime, reports
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.observe.pictures.timeline import (
    borders,
    common_devices,
    format_time,
    kinds_of,
    labels,
    lane_rows,
    quantum,
    shade,
    summary,
    ticks,
)

__all__ = ["PictureScale", "common_scale", "svg_timeline"]

TEXT = "#6e7781"
"""A grey with enough contrast on white and on GitHub's dark background: a picture does not know which one it is on."""
INK = "#16212c"
"""The colour of text on a task."""
CHARACTER, TITLE_CHARACTER, ROW, BAR, GAP, TOP = 7.0, 7.4, 26.0, 5.0, 12.0, 40.0
"""Pixels: the widths of a character of a label and of a title, the heights of a compute row and of a copy bar, the
space below a row and above the first."""
_BARS: dict[Queue, int] = {queue: k for k, queue in enumerate(queue for queue in Queue if queue is not Queue.COMPUTE)}
"""The bar below the compute row that each queue has; the second pair is there only if something is offloaded."""
BORDER = "#cf222e"
NARROWEST, WIDEST = 640.0, 1600.0


@dataclass(frozen=True, slots=True)
class PictureScale:
    """The horizontal scale that pictures to be compared have in common."""

    seconds: float
    """The time that ``width`` stands for."""
    left: float
    """Pixels before time 0, for the names of devices."""
    width: float
    """Pixels from time 0 to ``seconds``."""


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


class _Layout:
    """The scale and the vertical positions, in pixels."""

    def __init__(self, devices: Sequence[str], rows: Iterable[Lane], scale: PictureScale, top: float) -> None:
        self.scale = scale
        self.per_second = scale.width / scale.seconds if scale.seconds else 0.0
        self.right = scale.left + scale.width
        below = max([_BARS.get(lane.queue, -1) for lane in rows], default=-1) // 2 * 2 + 2
        height = ROW + (below * (BAR + 1) + 1 if below else 0) + GAP
        self.top = {device: top + number * height for number, device in enumerate(devices)}
        """The top of each device's compute row."""
        self.bottom = top + len(self.top) * height - GAP
        """The bottom of the lowest row."""

    def x(self, seconds: float) -> float:
        return self.scale.left + seconds * self.per_second


def common_scale(records: Sequence[StepRecord]) -> PictureScale:
    """A scale for ``svg_timeline`` on which all of ``records``, of which there is at least one, fit."""
    fitting = [_scale(_shown_steps([record])) for record in records]
    seconds = max(scale.seconds for scale in fitting)
    per_second = max((scale.width / scale.seconds for scale in fitting if scale.seconds), default=0.0)
    width = min(max(seconds * per_second, NARROWEST), WIDEST)
    return PictureScale(seconds, max(scale.left for scale in fitting), width)


def svg_timeline(
    record: StepRecord | Sequence[StepRecord],
    *,
    title: str = "",
    virtual: bool = False,
    scale: PictureScale | None = None,
    inline: bool = False,
) -> str:
    """The step as an SVG document: a row a device, copies below it, a legend, a time axis and the key figures.

    Several steps, in the order of their submissions, are drawn on one axis; a line stands where a device begins the
    next, and hovering over a task names its step.
    ``virtual`` times are printed as bare numbers, others with units. Hovering over a task shows its id, its times and
    what it waited for. If a device has several stages, later ones are paler. Give pictures that are to be compared the
    same ``scale``. ``inline`` makes the picture a part of a page: title, legend and key figures are left out.
    """
    records = [record] if isinstance(record, StepRecord) else record
    devices, steps = common_devices(records), _shown_steps(records)
    graph, longest = steps[0].graph, _longest(steps)
    top = 4.0 if inline else TOP
    layout = _Layout(devices, chain.from_iterable(step.rows for step in steps), scale or _scale(steps), top)
    name = escape(title or graph.schedule)
    drawing = [
        *_lanes(longest, layout),
        *(line for step in steps for line in _taken(step, layout, longest, virtual=virtual)),
        *(line for step in steps for line in _tasks(step, layout, longest, virtual=virtual)),
        *_borders(steps, layout),
        *_axis(layout, virtual=virtual),
        "</svg>",
    ]
    if inline:
        return "\n".join([_opening(layout, 28, f'aria-label="{name}"'), *drawing]) + "\n"
    kinds = kinds_of(time for step in steps for time in chain.from_iterable(step.rows.values()))
    figures = summary([step.result for step in steps], training=graph.training, virtual=virtual)
    below = f'<text x="{_n(layout.scale.left)}" y="{_n(layout.bottom + 42)}">{figures}</text>'
    head = [_opening(layout, 52, title=title), f"<title>{name}</title>", *_heading(name, kinds, layout.right), below]
    return "\n".join([*head, *drawing]) + "\n"


def _opening(layout: _Layout, below: float, attributes: str = "", *, title: str = "") -> str:
    """The opening tag of a picture with ``below`` pixels below its lanes and room for ``title``."""
    right, bottom = _n(max(layout.right, 8 + TITLE_CHARACTER * len(title)) + 24), _n(layout.bottom + below)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right} {bottom}" width="{right}" height="{bottom}" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, DejaVu Sans Mono, monospace" '
        f'font-size="11" fill="{TEXT}" role="img" {attributes}'.rstrip()
        + ">"
    )


def _n(pixels: float) -> str:
    """``pixels`` to a hundredth, which halves the size of the file."""
    return f"{pixels:.2f}".rstrip("0").rstrip(".")


def _shown_steps(records: Sequence[StepRecord]) -> list[_ShownStep]:
    earlier: dict[Lane, float] = {}
    shown = []
    for record, result in zip(records, reports(records), strict=True):
        rows = lane_rows(result, record.graph, copies=True)
        name = f"step {record.step}, " if len(records) > 1 else ""
        shown.append(_ShownStep(record.graph, result, rows, waits(record, result, earlier), name))
        earlier |= {lane: times[-1].end for lane, times in rows.items() if times}
    return shown


def _longest(steps: Sequence[_ShownStep]) -> float:
    return max(step.result.end for step in steps)


def _scale(steps: Sequence[_ShownStep]) -> PictureScale:
    """The scale for one picture: as wide as its labels need if its times have a quantum, else 1000 pixels."""
    graph, longest, width = steps[0].graph, _longest(steps), 1000.0
    left = CHARACTER * max(len(device) for device in graph.devices) + 16
    shown = [time for step in steps for time in step.result.tasks if time.seconds > 0]
    if quantum(shown) is not None:
        label = labels(graph)
        compute = (time for time in shown if time.task.lane.queue is Queue.COMPUTE)
        wanted = max(((len(label(t.task)) * CHARACTER + 6) / t.seconds for t in compute), default=0.0)
        width = min(max(longest * wanted, NARROWEST), WIDEST)
    return PictureScale(longest, left, width)


def _heading(title: str, kinds: Sequence[TaskKind], right: float) -> Iterator[str]:
    """The title on the left and the legend of the kinds on the right."""
    yield f'<text x="8" y="16" font-size="12" font-weight="bold">{title}</text>'
    x = right
    for kind in reversed(kinds):
        x -= len(kind.word) * CHARACTER + 26
        yield f'<rect x="{_n(x)}" y="20" width="12" height="12" rx="2" fill="{kind.colour}"/>'
        yield f'<text x="{_n(x + 6)}" y="29.2" font-size="9" text-anchor="middle" fill="{INK}">{kind.value}</text>'
        yield f'<text x="{_n(x + 16)}" y="29.5">{kind.word}</text>'


def _lanes(longest: float, layout: _Layout) -> Iterator[str]:
    """A band for each device, as wide as the picture's steps are long."""
    width = layout.x(longest) - layout.scale.left if longest else layout.scale.width
    for device, top in layout.top.items():
        yield f'<text x="8" y="{_n(top + ROW / 2 + 4)}">{escape(device)}</text>'
        yield (
            f'<rect class="lane" x="{_n(layout.scale.left)}" y="{_n(top)}" width="{_n(width)}" height="{_n(ROW)}" '
            f'fill="{TEXT}" fill-opacity="0.12"/>'
        )


def _taken(step: _ShownStep, layout: _Layout, longest: float, *, virtual: bool) -> Iterator[str]:
    """A darker band where another job had the device and the step computed nothing there."""
    for device, spans in step.result.taken.items():
        for start, end in spans:
            x, width = layout.x(start), (end - start) * layout.per_second
            times = [format_time(at, longest, virtual=virtual) for at in (start, end)]
            yield (
                f"<g><title>{step.name}another job had {escape(device)}: {times[0]} to {times[1]}</title>"
                f'<rect class="taken" x="{_n(x)}" y="{_n(layout.top[device])}" width="{_n(width)}" height="{_n(ROW)}" '
                f'fill="{TEXT}" fill-opacity="0.45"/></g>'
            )


def _tasks(step: _ShownStep, layout: _Layout, longest: float, *, virtual: bool) -> Iterator[str]:
    graph = step.graph
    label = labels(graph)
    mates = {device: [stage for stage, at in enumerate(graph.placement) if at == device] for device in graph.placement}
    for lane, times in step.rows.items():
        if not times:
            continue
        top, height = _band(lane, layout)
        yield f'<g text-anchor="middle" fill="{INK}">'
        for time in times:
            x, width = layout.x(time.start), time.seconds * layout.per_second
            story = step.name + _story(time, step.waited[time.task.number], longest, virtual=virtual)
            stages = mates[graph.placement[time.task.stage]]
            colour = shade(time.task.kind, stages.index(time.task.stage), len(stages))
            corners = ' rx="1.5"' if width > 6 else ""
            yield (
                f'<g class="task"><title>{escape(story)}</title>'
                f'<rect x="{_n(x)}" y="{_n(top)}" width="{_n(max(width - 0.8, 0.3))}" height="{_n(height)}"{corners} '
                f'fill="{colour}"/>' + _label(label(time.task), x, top, width, height) + "</g>"
            )
        yield "</g>"


def _story(time: TaskTime, waited: Wait, longest: float, *, virtual: bool) -> str:
    """The text that hovering over a task shows: when it ran, and what it waited for."""

    def shown(seconds: float) -> str:
        return format_time(seconds, longest, virtual=virtual)

    text = f"{time.task.id}: {shown(time.start)} to {shown(time.end)} on {time.task.lane}"
    if not waited.name:
        return text
    text += f"\nwaited for {waited.name} until {shown(waited.until)}"
    queue = "device" if time.task.lane.queue is Queue.COMPUTE else time.task.lane.queue.value
    idle = sum(waited.idle.values())
    return text if idle <= longest * 1e-9 else f"{text}, {queue} idle for {shown(idle)}"


def _band(lane: Lane, layout: _Layout) -> tuple[float, float]:
    """The top and the height of a lane: the compute row, or one of the bars below it."""
    top = layout.top[lane.device]
    if lane.queue is Queue.COMPUTE:
        return top, ROW
    return top + ROW + 2 + (BAR + 1) * _BARS[lane.queue], BAR


def _label(text: str, x: float, top: float, width: float, height: float) -> str:
    if height < ROW or len(text) * CHARACTER > width:
        return ""
    return f'<text x="{_n(x + (width - 0.8) / 2)}" y="{_n(top + height / 2 + 4)}">{text}</text>'


def _borders(steps: Sequence[_ShownStep], layout: _Layout) -> Iterator[str]:
    """A line down each device's row where it begins a later step, so that steps are told apart."""
    for lane, starts in borders([step.rows for step in steps]).items():
        if lane.queue is Queue.COMPUTE:
            for start in starts:
                x, y = layout.x(start) - 0.4, layout.top[lane.device] - 4
                yield f'<path class="border" d="M{_n(x)} {_n(y)}v{_n(ROW + 8)}" stroke="{BORDER}" stroke-width="2"/>'


def _axis(layout: _Layout, *, virtual: bool) -> Iterator[str]:
    y, longest = layout.bottom + 8, layout.scale.seconds
    yield '<g class="axis" text-anchor="middle">'
    yield f'<path d="M{_n(layout.scale.left)} {_n(y)}H{_n(layout.right)}" stroke="{TEXT}" fill="none"/>'
    if longest:
        for at, text in ticks(longest, CHARACTER / layout.per_second, 3, virtual=virtual):
            yield f'<path d="M{_n(layout.x(at))} {_n(y)}v4" stroke="{TEXT}"/>'
            yield f'<text x="{_n(layout.x(at))}" y="{_n(y + 16)}">{text}</text>'
    yield "</g>"
