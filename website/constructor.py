"""The constructor of a pipeline for the page of its reference: its signature, and a table of its options.

All is read from the dataclasses of the options, in whose fields types, defaults and texts are written.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from asyncpipe.pipeline.options import PipelineArguments, PipelineOptions
from asyncpipe.pipeline.pool_options import PoolOptions
from website.docstrings import as_markdown

__all__ = ["Option", "options", "signature", "with_constructor"]

HERE = "<!-- constructor -->"
"""Where a page has the constructor; repository hosts show nothing there."""
FIELD = f"{PipelineArguments.__module__}.{PipelineArguments.__qualname__}"
COLUMNS = 100


@dataclass(frozen=True, slots=True)
class Option:
    """An argument of ``Pipeline``, as its field says."""

    name: str
    type: str
    default: str
    """As it is written; empty where the argument must be given."""
    sentence: str
    """The first one of its text."""


def options() -> list[Option]:
    """All arguments of ``Pipeline``, those that must be given first."""
    declared = (PipelineArguments, PipelineOptions, PoolOptions)
    every = [option for source in declared for option in _of(inspect.getsource(source))]
    return sorted(every, key=lambda option: bool(option.default))


def signature() -> str:
    """The call with all arguments, as a program writes it."""
    given = [option.name + (f"={option.default}" if option.default else "") for option in options()]
    positional = [name for name in given if name in ("model", "devices")]
    arguments = ", ".join([*positional, "*", *(each for each in given if each not in positional)])
    lines = textwrap.wrap(arguments, COLUMNS, break_long_words=False, break_on_hyphens=False)
    return "\n".join(["asyncpipe.Pipeline(", *(f"    {line}" for line in lines), ")"])


def with_constructor(markdown: str) -> str:
    """``markdown`` with the signature and the table of options in the place that it marks."""
    if HERE not in markdown:
        return markdown
    rows = [
        f"| [`{option.name}`][{FIELD}.{option.name}] | `{option.type}` | "
        f"{f'`{option.default}`' if option.default else 'must be given'} | {option.sentence} |"
        for option in options()
    ]
    table = ["| option | type | default | what it is |", "|---|---|---|---|", *rows]
    shown = "\n".join(["```python", signature(), "```", "", *table])
    return markdown.replace(HERE, shown)


def _of(source: str) -> Iterator[Option]:
    """The fields of a dataclass, each with the text below it."""
    (made,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(made, ast.ClassDef)
    for line, below in zip(made.body, made.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            assert isinstance(below, ast.Expr), f"{line.target.id} has no text"
            assert isinstance(below.value, ast.Constant), f"{line.target.id} has no text"
            text = " ".join(str(below.value.value).split())
            yield Option(line.target.id, _type(line.annotation), _default(line.value), _first_sentence(text))


def _type(annotation: ast.expr) -> str:
    """The type as it is written, with the values of a name that stands for some of them."""
    text = ast.unparse(annotation).replace("'", '"')
    names = vars(sys.modules[PoolOptions.__module__])
    return " | ".join(f'"{value}"' for value in get_args(names[text])) if text == "TransportName" else text


def _default(value: ast.expr | None) -> str:
    """The default as it is written, also in a ``field(...)``; empty without one."""
    if isinstance(value, ast.Call):
        (value,) = [each.value for each in value.keywords if each.arg == "default"]
    return "" if value is None else ast.unparse(value).replace("'", '"')


def _first_sentence(text: str) -> str:
    sentence = re.split(r"(?<!e\.g\.)(?<=[^.]\.)\s+(?=[A-Z`])", text, maxsplit=1)[0]
    return as_markdown(sentence)
