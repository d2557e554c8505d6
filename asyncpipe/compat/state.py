"""State dicts with other names: those that an ancestor has saved, and those of the same layers in another split.

Everything is named ``partitions.J.NAME.…``, but the ancestors number partitions by the devices at that time, and wrap
some layers. Which layer an entry belongs to is found before anything is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from asyncpipe.errors import StateDictError
from asyncpipe.ops.model.batchnorm import DeferredBatchNorm
from asyncpipe.ops.model.skips import Skippable

__all__ = ["place_by_name", "place_by_order", "rename_layers"]

Position = tuple[str, str]
"""J and NAME of a layer."""

_KEY = re.compile(r"partitions\.(\d+)\.([^.]+)\.(.+)")


def place_by_name(root: nn.Module, state: dict[str, Any], prefix: str) -> bool:
    """Move the entries of each layer to its partition in ``root``, where no two layers have the same name.

    Returns whether the names in ``state`` are unique as well, without which nothing is changed.
    """
    homes = {name: index for index, name in _own_positions(root)}
    found = _positions(state, prefix)
    if len({name for _, name in found}) < len(found):
        return False
    _move(state, prefix, {(index, name): f"{homes.get(name, index)}.{name}" for index, name in found})
    return True


def place_by_order(root: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Name the layers of a whole ``state`` as in ``root``, in their order, if their entries are the same.

    A part of a state dict, and one with more layers, keeps its names. Raises ``StateDictError`` if it has both layers
    that ``root`` has not and lacks others, since by these names weights might come to a wrong layer.
    """
    wanted = {name: value for name, value in root.state_dict(prefix=prefix).items() if _key(name, prefix)}
    if _fits(root, dict(state), prefix, wanted):
        return
    found = _positions(state, prefix)
    owners = {name[: dot.start()] for name in wanted for dot in re.finditer(r"\.", name)}
    for apart in (False, True):
        homes = [home for home in _homes(root, apart=apart) if f"{prefix}partitions.{home}" in owners]
        if len(homes) == len(found):
            moved = dict(state)
            _move(moved, prefix, dict(zip(found, homes, strict=True)))
            if _fits(root, dict(moved), prefix, wanted):
                state.clear()
                state.update(moved)
                return
    own = _positions(wanted, prefix)
    if not set(found) <= set(own) and not set(own) <= set(found):
        raise StateDictError(
            f"the layers of the state dict are at {_listed(found)}, those of this {type(root).__name__} at "
            f"{_listed(own)}, and they are not the same layers one by one; a whole state dict of the same layers fits "
            "whatever its partitions are, and a part of one must have the names of this split and no others"
        )


def rename_layers(root: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Rename the entries within layers to the names that they have here.

    In the ancestors, a module with skips is the ``module`` of another one, and the sums that deferred batch norms have
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


def _key(name: str, prefix: str) -> re.Match[str] | None:
    """J, NAME and the rest of ``name``; ``None`` if it is no layer's."""
    return _KEY.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None


def _positions(state: dict[str, Any], prefix: str) -> list[Position]:
    """Where ``state`` has layers, in the layers' order. Files may have their keys in another one."""
    found = {(key[1], key[2]) for name in state if (key := _key(name, prefix))}
    return sorted(found, key=lambda at: (int(at[0]), int(at[1]) if at[1].isdecimal() else -1))


def _own_positions(root: nn.Module) -> Iterator[Position]:
    for index, part in root.get_submodule("partitions").named_children():
        for name in part._modules:  # named_children() omits the second occurrence of a layer.
            yield index, name


def _homes(root: nn.Module, *, apart: bool) -> Iterator[str]:
    """The names of the layers; ``apart``: sequences of one's own class are taken apart, as torch's ``Pipe`` did."""
    for index, name in _own_positions(root):
        layer = root.get_submodule(f"partitions.{index}.{name}")
        if apart and isinstance(layer, nn.Sequential):
            yield from (f"{index}.{name}.{inner}" for inner in layer._modules)
        else:
            yield f"{index}.{name}"


def _move(state: dict[str, Any], prefix: str, homes: dict[Position, str]) -> None:
    """Rename the entries of the layers at ``homes``' keys, in place."""
    for name, value in [(name, state.pop(name)) for name in list(state)]:
        key = _key(name, prefix)
        own = f"{prefix}partitions.{homes[key[1], key[2]]}.{key[3]}" if key else name
        state[own] = value


def _fits(root: nn.Module, state: dict[str, Any], prefix: str, wanted: dict[str, Any]) -> bool:
    """Whether ``state``, which is changed, has exactly what ``root`` has."""
    rename_layers(root, state, prefix)
    here = {name: value for name, value in state.items() if _key(name, prefix)}
    return here.keys() == wanted.keys() and all(_same_shape(here[name], value) for name, value in wanted.items())


def _same_shape(one: Any, other: Any) -> bool:
    tensors = isinstance(one, Tensor) and isinstance(other, Tensor) and not (is_lazy(one) or is_lazy(other))
    return not tensors or one.shape == other.shape


def _listed(positions: list[Position]) -> str:
    shown = ", ".join(f"{index}.{name}" for index, name in positions[:8])
    return f"partitions.{{{shown}{', …' if len(positions) > 8 else ''}}}"
