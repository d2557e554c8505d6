"""What all commands share to declare their arguments: the parser of a command, and types of arguments."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_command", "count", "counts", "natural", "seconds"]


def add_command(
    subparsers: Subparsers,
    name: str,
    *,
    summary: str,
    description: str | None = None,
    examples: str | None = None,
    allow_abbrev: bool = True,
) -> argparse.ArgumentParser:
    """Add the command ``name``; ``--help`` shows the description and examples with their line breaks."""
    return subparsers.add_parser(
        name,
        help=summary,
        description=description or f"{summary.capitalize()}.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=allow_abbrev,
    )


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


def seconds(text: str) -> float:
    """The finite, non-negative number of seconds in ``text``."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if 0 <= number < float("inf"):
        return number
    raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}")
