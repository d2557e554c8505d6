"""Checks of option values that several constructors make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from asyncpipe.errors import OptionError

__all__ = ["check_choice", "check_positive", "similar"]


def check_positive(name: str, value: int, error: type[OptionError] = OptionError) -> int:
    """``value`` if it is a positive integer; raises ``error`` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise error(f"{name} must be a positive integer, got {value!r}")
    return value


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises ``OptionError`` unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        meant = similar(str(value), allowed)
        hint = f"; {meant.rstrip()}" if meant else ""
        raise OptionError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}{hint}")


def similar(wrong: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """``did you mean 'name'? `` with the most similar name of ``known``, or an empty string if none is similar."""
    # Comparing takes quadratic time, and anyone may send a long name.
    close = get_close_matches(wrong[:60], list(known), n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}? " if close else ""
