"""Generators that a stage's modules keep themselves: a recomputation draws from them what its forward drew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from asyncpipe.ops.autograd.checkpoint import is_checkpointing, is_recomputing

__all__ = ["OwnGenerators"]

_NOTHING = nullcontext()


class OwnGenerators:
    """Those of one stage: attributes of its modules, also inside a list, tuple or dict there."""

    def __init__(self, module: nn.Module) -> None:
        values = [value for part in module.modules() for value in vars(part).values()]
        values += [inner for value in values if isinstance(value, (list, tuple)) for inner in value]
        values += [inner for value in values if type(value) is dict for inner in value.values()]
        self._generators = list({id(each): each for each in values if isinstance(each, torch.Generator)}.values())

    def during(self, states: list[Tensor]) -> AbstractContextManager[None]:
        """The context of a forward. A first run notes in ``states`` where they are; a second one begins from there.

        After a second run they are where they were before it. On the stage's thread.
        """
        return self._during(states) if self._generators else _NOTHING

    @contextmanager
    def _during(self, states: list[Tensor]) -> Iterator[None]:
        before = [generator.get_state() for generator in self._generators]
        if is_checkpointing():
            states[:] = before
        if not is_recomputing():
            yield
            return
        self._set(states)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
