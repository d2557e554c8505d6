"""Checks of option values that several constructors make."""

from __future__ import annotations

from collections.abc import Sequence

from asyncpipe.errors import OptionError

__all__ = ["check_choice", "check_positive"]


def check_positive(name: str, value: int, error: type[OptionError] = OptionError) -> int:
    """``value`` if it is a positive integer; raises ``error`` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise error(f"{name} must be a positive integer, got {value!r}")
    return value


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises ``OptionError`` unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise OptionError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
