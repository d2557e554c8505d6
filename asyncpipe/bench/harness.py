"""What the benchmarks share: rounds of alternating arms, times, medians, and tables in Markdown.

A benchmark compares arms. The arms run in turn within each round, in one process, so that whatever else the machine
does hits all of them; the figures are medians over the rounds, without those that warm up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, TypeVar

import torch

from asyncpipe.bench import Figures, Progress
from asyncpipe.runtime.portal import new_event_loop

__all__ = [
    "markdown",
    "medians",
    "one_intra_op_thread",
    "rounds",
    "run_on_loop",
    "seconds_of",
    "table",
]

_T = TypeVar("_T")

# Measuring


def run_on_loop(main: Coroutine[Any, Any, _T]) -> _T:
    """The result of ``main``, on the kind of event loop that the package uses."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def rounds(count: int, progress: Progress, what: str = "round") -> Iterator[int]:
    """The numbers of ``count`` rounds from 0; ``progress`` is told of each."""
    for number in range(count):
        progress(f"{what} {number + 1} of {count}")
        yield number


def seconds_of(work: Callable[[], object]) -> float:
    """The seconds that ``work`` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of every column; all rows have the same columns."""
    return {name: median(row[name] for row in rows) for name in rows[0]}


@contextmanager
def one_intra_op_thread() -> Iterator[None]:
    """The calling thread, and all that start later, compute without helpers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Showing


def markdown(**titles: str) -> Callable[[Figures], str]:
    """A benchmark's ``show``: a table for each key of its figures, whose rows are dicts or a single one.

    A title may have figures in braces. Columns are called like the keys of rows, and these say how a value is written:
    ``step_seconds`` is in milliseconds under *step*, ``us_a_task`` in microseconds, and ``idle_share`` in percent.
    """

    def show(figures: Figures) -> str:
        parts = []
        for key, title in titles.items():
            rows = figures[key] if isinstance(figures[key], list) else [figures[key]]
            names = list(dict.fromkeys(name for row in rows for name in row))
            head, units = zip(*map(_column, names), strict=True)
            cells = [[_cell(row.get(name), unit) for name, unit in zip(names, units, strict=True)] for row in rows]
            parts += [title.format(**figures), "\n".join(table([head, *cells]))]
        return "\n\n".join(parts)

    return show


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table; the first row is the head. All columns but the first align right."""
    head, *rest = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, [*column, "---"])) for column in zip(head, *rest, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in (head, rule, *rest)]
    return [f"| {' | '.join(row)} |" for row in aligned]


def _column(name: str) -> tuple[str, str]:
    """The heading of the column ``name``, and the unit of its values."""
    if name.startswith("us_"):
        return f"µs {name[3:]}".replace("_", " "), "µs"
    for ending, unit in (("_seconds", "ms"), ("_share", "%")):
        if name.endswith(ending):
            return name.removesuffix(ending).replace("_", " "), unit
    return name.replace("_", " "), ""


def _cell(value: Any, unit: str) -> str:
    if value is None:
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(_cell(each, unit) for each in value)
    forms = {"ms": lambda: f"{value * 1e3:.1f} ms", "%": lambda: f"{value:.1%}", "µs": lambda: f"{value:.2f}"}
    return forms[unit]() if unit else f"{value:.3f}" if isinstance(value, float) else str(value)
