"""Steps compared on one HTML page: schedules at the same costs, or a simulated step beside the measured one.

The page is one file that needs nothing else: style, script and pictures are in it::

    ┌──────────────────────────────────────────────┐
    │ table: makespan, bubble, peak, memory        │  sorted by a click
    ├──────────────────────────────────────────────┤
    │ ■ forward ■ backward …            zoom ──●── │
    ├──────────────────────────────────────────────┤
    │ gpipe   [F0][F1]······[B1  ][B0  ]           │  a timeline each, all on one scale
    │ 1f1b    [F0]···[B0  ][F1]···[B1  ]           │
    └──────────────────────────────────────────────┘

Hovering over a task shows when it ran and what it waited for, and picks out its micro-batch in every timeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from asyncpipe.core.engine.events import StepRecord
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.memory import format_bytes
from asyncpipe.core.predict.report import Report, peak_per_device, report
from asyncpipe.errors import OptionError
from asyncpipe.observe.pictures.page import SCRIPT, STYLE
from asyncpipe.observe.pictures.svg import common_scale, has_few_copies, svg_timeline
from asyncpipe.observe.pictures.timeline import format_time

__all__ = ["ComparedStep", "html_comparison"]


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """One step of a comparison."""

    title: str
    """What the table and the heading call it."""
    record: StepRecord
    virtual: bool
    """Whether times are units of a cost model, and not seconds; the same in every entry of a page."""
    memory: Sequence[int] | None = None
    """Peak bytes per device, where they are known."""
    detail: str = ""
    """A line below the heading: the shape, the costs."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """What a table shows, what it is sorted by, and what it shows smaller below."""

    text: str
    value: float | str
    below: str = ""


def html_comparison(entries: Sequence[ComparedStep], *, title: str = "Steps compared") -> str:
    """An HTML document with a table and a timeline of each entry, all on one time scale.

    A measured step comes from an observer of a pipeline, which is shown every ``StepRecord``; a simulated one of
    the same graph from ``simulate``, at costs in seconds, such as those that a profile measured::

        pipe.observers.append(recorder)                 # recorder.step_completed(record) keeps it
        await (await pipe.step(x, target)).completed()
        measured = recorder.record
        simulated = simulate(measured.graph, costs)
        page = html_comparison([ComparedStep("measured", measured, False), ComparedStep("simulated", simulated, False)])

    Raises ``OptionError`` if there is no entry, if virtual times are mixed with seconds, or if an entry's memory is
    not one number a device.
    """
    _check(entries)
    results = [report(entry.record) for entry in entries]
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        f'<head><meta charset="utf-8"><title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{STYLE}</style></head>",
        f"<body><h1>{escape(title)}</h1>",
        *_table(entries, results),
        *_bar(entries, results),
        *_pictures(entries),
        '<div id="tip" role="status" hidden></div>',
        f"<script>{SCRIPT}</script>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _check(entries: Sequence[ComparedStep]) -> None:
    if not entries:
        raise OptionError("entries must have at least one step to show")
    if len({entry.virtual for entry in entries}) > 1:
        raise OptionError("entries must be all virtual or all in seconds: one time scale holds for all of them")
    for entry in entries:
        devices = len(entry.record.graph.devices)
        if entry.memory is not None and len(entry.memory) != devices:
            raise OptionError(
                f"memory must have one number for each of {devices} devices, got {len(entry.memory)} in {entry.title!r}"
            )


def _pictures(entries: Sequence[ComparedStep]) -> Iterator[str]:
    """A section for each entry; all timelines have one scale."""
    scale = common_scale([entry.record for entry in entries])
    # In all pictures or in none: next to one without arrows, one with them would seem to say more.
    arrows = all(has_few_copies(entry.record.graph) for entry in entries)
    for number, entry in enumerate(entries):
        picture = svg_timeline(
            entry.record,
            title=entry.title,
            virtual=entry.virtual,
            arrows=arrows,
            scale=scale,
            inline=f"picture-{number}-",
        )
        yield f'<section id="step-{number}"><h2>{escape(entry.title)}</h2>'
        if entry.detail:
            yield f'<p class="detail">{escape(entry.detail)}</p>'
        yield f'<div class="scroll">{picture}</div></section>'


def _bar(entries: Sequence[ComparedStep], results: Sequence[Report]) -> Iterator[str]:
    """The legend of the kinds that took time in any of the steps, and the slider."""
    ran = {time.task.kind for result in results for time in result.tasks if time.seconds > 0}
    yield '<div class="bar">'
    for kind in TaskKind:
        if kind in ran:
            yield f'<span class="kind" style="--kind:{kind.colour}">{kind.value} {kind.word}</span>'
    if any(len(set(graph.placement)) < len(graph.placement) for graph in (entry.record.graph for entry in entries)):
        yield "<span>paler: a later stage of the same device</span>"
    slider = '<input id="zoom" type="range" min="0" max="5" step="0.25" value="0">'
    yield f'<label class="zoom" for="zoom">zoom {slider}</label>'
    yield "</div>"


def _table(entries: Sequence[ComparedStep], results: Sequence[Report]) -> Iterator[str]:
    headings = ["step", "makespan", "of the shortest", "bubble", "peak in flight"]
    if any(entry.memory is not None for entry in entries):
        headings.append("peak memory")
    shortest = min((result.seconds for result in results), default=0.0)
    yield '<div class="table"><table><thead><tr>'
    yield from (f'<th scope="col"><button type="button">{heading}</button></th>' for heading in headings)
    yield "</tr></thead><tbody>"
    for number, (entry, result) in enumerate(zip(entries, results, strict=True)):
        cells = list(_cells(entry, result, shortest))[: len(headings) - 1]
        yield f'<tr><td data-v="{escape(entry.title)}"><a href="#step-{number}">{escape(entry.title)}</a></td>'
        yield from (
            f'<td data-v="{cell.value}">{escape(cell.text)}'
            + (f"<small>{cell.below}</small>" * bool(cell.below))
            + "</td>"
            for cell in cells
        )
        yield "</tr>"
    yield "</tbody></table></div>"


def _cells(entry: ComparedStep, result: Report, shortest: float) -> Iterator[_Cell]:
    """Makespan, its share of the shortest one, bubble, peak and memory; those of each device below."""
    yield _Cell(format_time(result.seconds, result.seconds, virtual=entry.virtual), result.seconds)
    share = result.seconds / shortest if shortest else 1.0
    yield _Cell(f"{share:.1%}", share)
    idle = [1.0 - busy for busy in result.device_utilization.values()] if result.seconds else []
    yield _Cell(f"{result.bubble_ratio:.1%}", result.bubble_ratio, _each(f"{bubble:.1%}" for bubble in idle))
    peaks = peak_per_device(result, entry.record.graph)
    yield _Cell(f"{max(peaks):.4g}", max(peaks), _each(f"{peak:.4g}" for peak in peaks))
    if entry.memory is None:
        yield _Cell("–", -1)
    else:
        yield _Cell(format_bytes(max(entry.memory)), max(entry.memory), _each(map(format_bytes, entry.memory)))


def _each(texts: Iterable[str]) -> str:
    """The figures of the devices in their order; one alone where all are the same."""
    shown = list(texts)
    if len(set(shown)) == 1:
        return "on each device" if len(shown) > 1 else ""
    return " · ".join(shown)
