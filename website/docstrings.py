"""Docstrings as Markdown: names that the reference shows are links, and ``::`` before a block is a colon.

An extension of griffe, which reads the docstrings for the site.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from griffe import Extension, Object

from website.reference import shown

__all__ = ["PlainDocstrings", "as_markdown"]

NAME = re.compile(r"``([A-Za-z_][\w.]*)``")


@cache
def _full_names() -> dict[str, str]:
    return {name.rpartition(".")[2]: name for name in shown()}


def as_markdown(docstring: str, own: str = "") -> str:
    """``docstring`` of the object called ``own``, to which it makes no link."""
    text = re.sub(r"^( *)::\n\n?", r"\n", docstring, flags=re.MULTILINE)
    text = re.sub(r"::$", ":\n", text, flags=re.MULTILINE)
    return NAME.sub(lambda found: _linked(found[1], own), text)


def _linked(name: str, own: str) -> str:
    full = _full_names().get(name.removeprefix("asyncpipe."))
    return f"``{name}``" if full is None or name == own else f"[`{name}`][{full}]"


class PlainDocstrings(Extension):
    """Changes each docstring when its object is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of ``obj``."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, obj.name)
