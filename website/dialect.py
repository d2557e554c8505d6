"""Markdown as repository hosts read it (CommonMark), for the site's parser.

That one wants four spaces before what belongs to an item of a list, and an empty line before a list.
"""

from __future__ import annotations

import re
from itertools import groupby

from website.pages import prose

__all__ = ["for_site"]

ITEM = re.compile(r"^( *)([-*+]|\d+\.)( +)(?=\S)")


def for_site(markdown: str) -> str:
    """``markdown`` with the indents of lists that the site's parser understands."""
    lists = _Lists()
    for is_text, lines in groupby(prose(markdown), lambda line: line[1]):
        if is_text:
            for line, _ in lines:
                lists.text(line)
        else:
            lists.code([line for line, _ in lines])
    return "\n".join(lists.lines)


class _Lists:
    """The lines so far, and the items around the next one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._offsets: list[int] = []
        """The columns at which the texts of the items around begin, outermost first."""
        self._after_blank = True

    def text(self, line: str) -> None:
        spaces, item = len(line) - len(line.lstrip()), ITEM.match(line)
        if not line.strip():
            self.lines.append("")
            self._after_blank = True
            return
        if item or self._after_blank or line.startswith("#"):
            self._leave(spaces)
        if item and not self._offsets and not self._after_blank:
            self.lines.append("")
        self._add(line, spaces)
        if item:
            self._offsets.append(len(item[0]))
        self._after_blank = False

    def code(self, lines: list[str]) -> None:
        """A code block belongs to the items in which it begins."""
        spaces = len(lines[0]) - len(lines[0].lstrip())
        self._leave(spaces)
        for line in lines:
            self._add(line, spaces)
        self._after_blank = False

    def _leave(self, spaces: int) -> None:
        while self._offsets and spaces < self._offsets[-1]:
            self._offsets.pop()

    def _add(self, line: str, spaces: int) -> None:
        depth = sum(spaces >= offset for offset in self._offsets)
        cut = self._offsets[depth - 1] if depth else 0
        self.lines.append("    " * depth + line[cut:] if line.strip() else "")
