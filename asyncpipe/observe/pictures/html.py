"""Steps compared on one HTML page: schedules at the same costs, or a simulated step beside the measured one.

The page is a single file; style and pictures are in it::

    ┌──────────────────────────────────────────────┐
    │ table: makespan, bubble, peak                │
    ├──────────────────────────────────────────────┤
    │ ■ forward ■ backward …                       │
    ├──────────────────────────────────────────────┤
    │ gpipe   [F0][F1]······[B1  ][B0  ]           │  a timeline of each step, all on one scale
    │ 1f1b    [F0]···[B0  ][F1]···[B1  ]           │
    └──────────────────────────────────────────────┘

Hovering over a task shows when it ran and what it waited for. The page is the jinja2 template ``comparison.html``.
jinja2 escapes all texts except the pictures, which are markup already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from asyncpipe.core.predict.report import Report, peak_per_device, report
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.errors import OptionError
from asyncpipe.observe.pictures.svg import svg_timeline
from asyncpipe.observe.pictures.templates import rendered
from asyncpipe.observe.pictures.timeline import format_time, kinds_of

__all__ = ["ComparedStep", "html_comparison"]


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """One step of a comparison."""

    title: str
    """Its name in the table and above its timeline."""
    record: StepRecord
    virtual: bool
    """Whether times are units of a cost model instead of seconds; the same in every step of a page."""
    detail: str = ""
    """A line below the heading, such as the shape and the costs."""


def html_comparison(steps: Sequence[ComparedStep], *, title: str = "Steps compared") -> str:
    """An HTML document with a table of all steps and a timeline of each, all on one time scale.

    The record of a measured step comes from an observer of a pipeline. ``simulate`` makes the record of a simulated
    step of the same graph, at costs in seconds, such as those that a profile measured::

        pipe.observers.append(recorder)                 # recorder.step_completed(record) keeps it
        await (await pipe.step(x, target)).completed()
        measured = recorder.record
        simulated = simulate(measured.graph, costs)
        page = html_comparison([ComparedStep("measured", measured, False), ComparedStep("simulated", simulated, False)])

    Raises ``OptionError`` if there is no step, and if virtual times are mixed with seconds.
    """
    _check(steps)
    results = [report(step.record) for step in steps]
    headings = ["step", "makespan", "of the shortest", "bubble", "peak in flight"]
    shortest = min(result.seconds for result in results)
    cells = [list(_cells(*each, shortest)) for each in zip(steps, results, strict=True)]
    longest = max(result.end for result in results)
    placements = [step.record.graph.placement for step in steps]
    return rendered(
        "comparison.html",
        title=title,
        headings=headings,
        rows=list(zip(steps, cells, strict=True)),
        kinds=kinds_of(time for result in results for time in result.tasks if time.seconds > 0),
        shared_devices=any(len(set(placement)) < len(placement) for placement in placements),
        pictures=[
            (step, svg_timeline(step.record, title=step.title, virtual=step.virtual, seconds=longest, inline=True))
            for step in steps
        ],
    )


def _check(steps: Sequence[ComparedStep]) -> None:
    if not steps:
        raise OptionError("steps must have at least one step to show")
    if len({step.virtual for step in steps}) > 1:
        raise OptionError("steps must be all virtual or all in seconds, since they share one time scale")


def _cells(step: ComparedStep, result: Report, shortest: float) -> Iterator[tuple[str, str]]:
    """Makespan, its ratio to the shortest one, bubble and peak in flight; with each, the devices' own below."""
    yield format_time(result.seconds, result.seconds, virtual=step.virtual), ""
    yield f"{result.seconds / shortest if shortest else 1.0:.1%}", ""
    idle = [1.0 - busy for busy in result.device_utilization.values()] if result.seconds else []
    yield f"{result.bubble_ratio:.1%}", _each(f"{bubble:.1%}" for bubble in idle)
    peaks = peak_per_device(result, step.record.graph)
    yield f"{max(peaks):.4g}", _each(f"{peak:.4g}" for peak in peaks)


def _each(texts: Iterable[str]) -> str:
    """The figures of the devices in their order, or a note that all devices have the same."""
    shown = list(texts)
    if len(set(shown)) == 1:
        return "on each device" if len(shown) > 1 else ""
    return " · ".join(shown)
