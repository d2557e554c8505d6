"""The texts of all commands, as ``asyncpipe COMMAND --help`` prints them."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from unittest.mock import patch

from asyncpipe.cli import main

__all__ = ["commands_page", "help_text"]

COLUMNS = {"COLUMNS": "100"}


def help_text(*command: str) -> str:
    """What ``asyncpipe COMMAND --help`` prints on a terminal of 100 columns."""
    printed = io.StringIO()
    with patch.dict("os.environ", COLUMNS), redirect_stdout(printed), suppress(SystemExit):
        main([*command, "--help"])
    return printed.getvalue()


def commands_page() -> str:
    """A heading and a text for each command, and for those below it."""
    with patch.dict("os.environ", COLUMNS):
        return "".join(
            f"\n{'##' if len(words) == 1 else '###'} asyncpipe {' '.join(words)}\n\n```text\n{text}```\n"
            for words, text in _every(_parsers(), ())
        )


def _parsers() -> argparse.ArgumentParser:
    found: list[argparse.ArgumentParser] = []

    def note(parser: argparse.ArgumentParser, *_: object) -> None:
        found.append(parser)
        raise SystemExit

    with patch.object(argparse.ArgumentParser, "parse_known_args", note), suppress(SystemExit):
        main([])
    return found[0]


def _every(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield (*words, name), help_text(*words, name)
                yield from _every(below, (*words, name))
