"""Functions that are called in several processes: named ``module:function``, and with draws that follow from a seed."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from asyncpipe.errors import ArgumentTypeError, OptionError
from asyncpipe.ops.autograd.own_draws import OwnDraws

__all__ = ["SeededDraws", "check_function", "find_function", "function_name"]

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def check_function(whose: str, function: object) -> None:
    """Raise ``OptionError`` or ``ArgumentTypeError`` for what is neither a name of a function nor callable."""
    if isinstance(function, str):
        if not _NAME.fullmatch(function):
            raise OptionError(f"a {whose}'s function is 'module:function' or a function, got {function!r}")
    elif not callable(function):
        raise ArgumentTypeError(
            f"a {whose}'s function is 'module:function' or a function, got {type(function).__name__}"
        )


def function_name(function: str | Callable[..., Any]) -> str:
    """How messages call it."""
    return function if isinstance(function, str) else getattr(function, "__qualname__", "function")


def find_function(whose: str, function: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function. Raises ``OptionError``, which calls its owner ``whose``, if it cannot be imported."""
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    try:
        found: object = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"{whose} cannot be found ({error}); it must be importable in every process") from error
    if not callable(found):
        raise OptionError(f"{whose} is a {type(found).__name__}, not a function")
    return found


class SeededDraws(OwnDraws):
    """A context in which this thread draws from a CPU generator of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed % 2**63)

    def generator(self, device: torch.device) -> torch.Generator | None:
        return self._generator if device.type == "cpu" else None
