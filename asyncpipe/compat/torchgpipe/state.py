"""State dicts of ``GPipe`` with another balance, and those that torchgpipe has saved.

Everything is named ``partitions.J.NAME.…``; NAME is the layer's in the whole module, and J follows from the balance.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from asyncpipe.errors import StateDictError
from asyncpipe.ops.model.batchnorm import DeferredBatchNorm
from asyncpipe.ops.model.skips import Skippable

__all__ = ["place_by_name", "rename_layers"]

_KEY = re.compile(r"partitions\.(\d+)\.([^.]+)\.(.+)")


def place_by_name(root: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Move the entries of each layer, in place, to the partition of ``root`` that has the layer.

    Raises ``StateDictError`` where two layers of ``state`` have one name, by which weights might come to a wrong layer.
    """
    parts = root.get_submodule("partitions").named_children()
    homes = {name: index for index, part in parts for name in part._modules}  # named_children() omits a second use.
    keys = {name: key for name in state if name.startswith(prefix) and (key := _KEY.fullmatch(name, len(prefix)))}
    places = {(key[1], key[2]) for key in keys.values()}
    if len({name for _, name in places}) < len(places):
        listed = ", ".join(".".join(place) for place in sorted(places))
        raise StateDictError(
            f"the layers of the state dict are at partitions.{{{listed}}}, and two of them have one name; in a GPipe "
            "each layer has the name that it has in the whole module"
        )
    for name, value in [(name, state.pop(name)) for name in list(state)]:
        key = keys.get(name)
        state[f"{prefix}partitions.{homes.get(key[2], key[1])}.{key[2]}.{key[3]}" if key else name] = value


def rename_layers(root: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Rename the entries within layers to the names that they have here.

    In torchgpipe, a module with skips is the ``module`` of another one, and the sums that deferred batch norms have
    gathered are part of the state dict.
    """
    for name, module in root.named_modules():
        own = f"{prefix}{name}."
        if isinstance(module, DeferredBatchNorm):
            state.pop(f"{own}sum", None)
            state.pop(f"{own}sum_squares", None)
        if issubclass(type(module), Skippable) and not any(key in state for key in module.state_dict(prefix=own)):
            inner = f"{own}module."
            for key in [key for key in state if key.startswith(inner)]:
                state[own + key.removeprefix(inner)] = state.pop(key)
