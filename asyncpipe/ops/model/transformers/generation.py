"""The caches of stages while tokens are generated.

``generate`` of transformers makes one cache for all layers. Each stage is given a view of it: its own layers are those
of the cache, so reordering beams reaches them, and all others are *clocks*, which grow by as many tokens as the stage
has seen. A model asks its first layers how many tokens there were, and in a later stage these may be ahead::

    cache      0  1  2  3
    stage 0    0  1  ·  ·      · a clock: keys and values without numbers, as long as the stage's own
    stage 1    ·  ·  2  3
"""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

__all__ = ["TURN", "CacheTurn"]

TURN = "asyncpipe_turn"
"""The name among a micro-batch's arguments under which stages find the number of their ``CacheTurn``."""

_turns: WeakValueDictionary[int, CacheTurn] = WeakValueDictionary()
_numbers = count()


class CacheTurn:
    """What the stages are to do for a micro-batch of requests: encode, or go on by some tokens with their caches."""

    def __init__(self, cache: Any, *, encodes: bool = False) -> None:
        """``cache`` has seen no token yet. ``None`` if none is kept."""
        self.cache = cache
        self.encodes = encodes
        """Whether only the encoder runs, and its hidden states are returned."""
        self._fresh = [copy(layer) for layer in _layers(cache)]
        self._views: dict[tuple[int, ...], Any] = {}
        self.number = next(_numbers)
        _turns[self.number] = self

    @staticmethod
    def of(number: int) -> CacheTurn:
        """The one of this number: that goes through a pipeline, which takes no objects that have tensors."""
        return _turns[number]

    def view(self, own: Collection[int]) -> Any:
        """The cache for the stage that has these layers; ``None`` if none is kept."""
        if self.cache is None:
            return None
        key = tuple(own)
        if key not in self._views:
            real = _layers(self.cache)
            layers = [real[i] if i in own else copy(self._fresh[i]) for i in range(len(real))]
            self._views[key] = _with_layers(self.cache, layers)
        return self._views[key]

    def seen(self, own: Collection[int], hidden: Tensor) -> None:
        """Move the clocks of this stage on by the tokens of ``hidden``."""
        nothing = hidden.new_zeros(hidden.shape[0], 1, hidden.shape[1], 1)
        for number, layer in enumerate(_layers(self.view(own))):
            if number not in own:
                layer.update(nothing, nothing)


def _layers(cache: Any) -> list[Any]:
    found: list[Any] = getattr(getattr(cache, "self_attention_cache", cache), "layers", [])
    return found


def _with_layers(cache: Any, layers: list[Any]) -> Any:
    """A cache with other layers; what an encoder's attention keeps is that of ``cache``."""
    made = copy(cache)
    if hasattr(cache, "self_attention_cache"):
        made.self_attention_cache = _with_layers(cache.self_attention_cache, layers)
    else:
        made.layers = layers
    return made
