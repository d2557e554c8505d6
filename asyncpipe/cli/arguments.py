"""What all commands share to declare their arguments: the parser of a command, and types of arguments."""

from __future__ import annotations

import argparse
import inspect
import re
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncpipe.errors import OptionError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = [
    "add_command",
    "add_set",
    "changes",
    "count",
    "counts",
    "help_texts",
    "moment",
    "names",
    "natural",
    "seconds",
    "writing",
]

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add_command(subparsers: Subparsers, name: str, text: str | None, **options: Any) -> argparse.ArgumentParser:
    """Add the command ``name``, whose help is ``text``: the docstring of what runs it, as ``help_texts`` reads it."""
    summary = inspect.cleandoc(text or "").partition("\n")[0].rstrip(".")
    return subparsers.add_parser(name, help=summary[:1].lower() + summary[1:], **help_texts(text), **options)


def help_texts(text: str | None) -> dict[str, Any]:
    """How a parser shows the docstring ``text``, with its line breaks.

    The first line is the summary. The rest is the description, if there is any; from the first heading on, as
    ``examples:``, it stands below the options.
    """
    summary, _, rest = inspect.cleandoc(text or "").partition("\n")
    description, *sections = re.split(r"\n(?=[a-z].*:\n)", f"{rest}\n", maxsplit=1)
    texts = {"description": description.strip() or summary, "epilog": "".join(sections)}
    return {**texts, "formatter_class": argparse.RawDescriptionHelpFormatter}


# Job files


def add_set(parser: argparse.ArgumentParser, example: str = "pipeline.microbatches=8") -> None:
    """Add --set, whose pairs are ``args.set``."""
    text = f"another value of a key, as {example}; written as in TOML, or none for the default; may be repeated"
    parser.add_argument("--set", type=_pair, action="append", default=[], metavar="KEY=VALUE", help=text)


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, as training.steps=200; got {text!r}")
    if value == "none":
        return key, None
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value  # A text without quotes.


def changes(args: argparse.Namespace, keys: Mapping[str, str]) -> dict[str, Any]:
    """The changes of a job file that ``--set`` and options ask for; ``keys`` says for which key each option stands.

    Raises ``OptionError`` for a key that is given twice.
    """
    given = [(key, value) for option, key in keys.items() if (value := getattr(args, option)) is not None]
    found: dict[str, Any] = {}
    for key, value in [*given, *args.set]:
        if key in found:
            raise OptionError(f"{key} is given twice: {found[key]!r}, then {value!r}")
        found[key] = value
    return found


# Types


def count(text: str) -> int:
    """The positive integer in ``text``."""
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")


def counts(text: str) -> list[int]:
    """The positive integers in ``text``, separated by commas."""
    return [count(item.strip()) for item in text.split(",")]


def natural(text: str) -> int:
    """The non-negative integer in ``text``."""
    if text.isascii() and text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f"must be an integer of at least 0, got {text!r}")


def names(text: str) -> list[str]:
    """The names in ``text``, separated by commas."""
    found = [name.strip() for name in text.split(",")]
    if all(found):
        return found
    raise argparse.ArgumentTypeError(f"must be names with commas between them, got {text!r}")


def seconds(text: str) -> float:
    """The finite, non-negative number of seconds in ``text``."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if 0 <= number < float("inf"):
        return number
    raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}")


def moment(text: str) -> float:
    """A Unix time: a number, a date and time as ISO 8601 has it, or a span of time from now (``6h``), as ``-2d``."""
    if found := re.fullmatch(r"([+-]?[0-9]+(?:\.[0-9]+)?)([smhd])", text):
        return time.time() + float(found[1]) * _UNITS[found[2]]
    try:
        return float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        rule = "must be a time as 2026-12-01T08:00, a Unix time, or a span from now as 6h or -2d"
        raise argparse.ArgumentTypeError(f"{rule}; got {text!r}") from None


# Files


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` of the block, which writes ``path``, into an ``OptionError``."""
    try:
        yield
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror or error}") from error
