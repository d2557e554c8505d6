"""Tables of the command line: complete and without escape sequences in files and pipes, as wide as a terminal there."""

from __future__ import annotations

import io
import sys

import pytest

from asyncpipe.cli.tables import table
from asyncpipe.errors import OptionError

HEAD = ("NAME", "STEP", "CAUSE")
ROWS = [("a[red]b", "7", "because " * 40 + "of it"), ("c", "10", "")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_piped_is_complete_at_any_width_and_has_no_colours(monkeypatch):
    texts = set()
    for columns, colour in (("20", "FORCE_COLOR"), ("200", "NO_COLOR")):
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setenv(colour, "1")
        texts.add(table(HEAD, ROWS, numbers=("STEP",), out=io.StringIO()))
    assert texts == {f"NAME     STEP  CAUSE\na[red]b     7  {ROWS[0][2]}\nc          10"}


def test_on_a_terminal_the_last_column_is_cut(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    heading, first, second = table(HEAD, ROWS, out=Terminal()).splitlines()
    assert heading.startswith("\x1b[1m")
    assert first.startswith("a[red]b  7     because ")
    assert first.endswith("…")
    assert len(first) == 40
    assert second.split() == ["c", "10"]


def test_without_names_there_is_no_heading():
    assert table(("", ""), [("a", "b"), ("ccc", "d")], out=io.StringIO()) == "a    b\nccc  d"


def test_without_rich_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(OptionError, match=r"pip install -e '\.\[cli\]'"):
        table(HEAD, ROWS)
