"""Tables of the command line, drawn by rich: as wide as the terminal there, complete and without colours elsewhere."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TextIO, TypeVar

from asyncpipe.errors import missing_package

__all__ = ["columns", "table", "terminal_width"]

_Row = TypeVar("_Row")

UNLIMITED = 10**9
"""Columns of a file or pipe, to which tables are never cut."""


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Collection[str] = (),
    out: TextIO | None = None,
) -> str:
    """A table for ``out`` (default: stdout), without a newline at its end; columns named in ``numbers`` align right.

    There is no heading if all names are empty. On a terminal that is too narrow the last column is cut. Elsewhere the
    text is complete, without escape sequences, and independent of any width. Raises ``OptionError`` without rich.
    """
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise missing_package("tables need rich", "cli") from error
    is_terminal = (out or sys.stdout).isatty()
    drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=any(head))
    for number, name in enumerate(head, 1):
        drawn.add_column(name, justify="right" if name in numbers else "left", no_wrap=number < len(head))
    for row in rows:
        # Text, so that brackets in a cell are not taken for rich's markup; and in one line.
        drawn.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in row))
    width = shutil.get_terminal_size().columns if is_terminal else UNLIMITED
    console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal)
    with console.capture() as capture:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def columns(shown: Mapping[str, Callable[[_Row], str]], rows: Iterable[_Row], *, numbers: Collection[str] = ()) -> str:
    """A table of ``rows`` for stdout: for each column its heading, and what it shows of a row."""
    return table(list(shown), [[cell(row) for cell in shown.values()] for row in rows], numbers=numbers)


def terminal_width() -> int | None:
    """The columns of the terminal that stdout is; ``None`` if it is a pipe or a file, whose lines have no limit."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
