"""Notices random numbers that Python draws while a model is traced: they would be constants of the trace.

Draws of torch are operations, which each call repeats. Those of ``random`` and numpy happen once, in the trace.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["PythonDraws"]


class PythonDraws:
    """The states of Python's and numpy's generators: the global ones, and those that modules hold."""

    def __init__(self, model: nn.Module) -> None:
        self._own = [(name, key) for name, module in model.named_modules() for key in _generators(module)]
        self._model = model
        self._before = dict(self._states())

    def drawn(self) -> str:
        """From what numbers were drawn since, in words; empty if from nothing. Another thread may have drawn them."""
        return next((what for what, state in self._states() if not _is_equal(self._before[what], state)), "")

    def _states(self) -> Iterator[tuple[str, Any]]:
        return ((what, _state(generator)) for what, generator in self._all())

    def _all(self) -> Iterator[tuple[str, Any]]:
        """What draws, in words, and the generator."""
        yield "Python's random module", random
        if "numpy" in sys.modules:
            yield "numpy.random", sys.modules["numpy"].random
        modules = dict(self._model.named_modules())
        for name, key in self._own:
            yield f"{f'{name}.' if name else 'its '}{key}", vars(modules[name])[key]


def _generators(module: nn.Module) -> list[str]:
    """The attributes of a module that are generators of Python or numpy."""
    kinds: tuple[type, ...] = (random.Random,)
    if "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"]
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    return [key for key, value in vars(module).items() if isinstance(value, kinds)]


def _state(generator: Any) -> Any:
    if hasattr(generator, "getstate"):
        return generator.getstate()
    return generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state


def _is_equal(one: Any, other: Any) -> bool:
    """Of two states, which may hold numpy's arrays."""
    if isinstance(one, dict):
        return all(_is_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return all(map(_is_equal, one, other))
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)
