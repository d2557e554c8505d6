"""Nested values: which tensors a value holds, and the same value with other tensors.

Containers are those of torch's pytree (tuples, lists, dicts, what is registered there), named tuples and dataclasses.
Dataclasses are handled here rather than registered, since torch has one registry for the whole process, which
``torch.export`` reads too. Any other object is a leaf. One that holds tensors is refused: they would reach the next
stage without their gradients, and would not be cut into micro-batches.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncpipe.errors import AsyncpipeError, StageError
from asyncpipe.ops.torch_internals import SUPPORTED_NODES

__all__ = ["Structure", "flatten", "leaves_of", "lost_attribute", "places", "rebuild", "structure_of", "tensors_of"]


_Make = Callable[[type, Any, list[Any]], Any]


class Structure(NamedTuple):
    """A container: how it is made from the values inside. A leaf has none (``None``)."""

    make: _Make
    kind: type
    context: Any
    inside: tuple[Structure | None, ...]


def flatten(
    value: Any, *, wraps: tuple[type, ...] = (), error: type[AsyncpipeError] = StageError
) -> tuple[list[Any], Structure | None]:
    """The leaves of ``value`` in order, and its structure. Costs 0.5 µs a tensor and 1 µs a container.

    Raises ``error`` for an object that holds tensors, unless it is one of ``wraps``.
    """
    leaves: list[Any] = []
    structure = _flatten(value, leaves)
    for leaf in leaves:
        if type(leaf) not in _SIMPLE and not isinstance(leaf, (Tensor, *wraps)) and _holds_tensor(leaf):
            name = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
            raise error(
                f"a value of the class {name} holds tensors that a pipeline cannot see; use a dataclass, a named tuple "
                "or a dict in its place, or register the class with torch.utils._pytree.register_pytree_node"
            )
    return leaves, structure


def rebuild(structure: Structure | None, leaves: Iterable[Any]) -> Any:
    """The value of this structure with these leaves. A dataclass is made without its ``__init__``."""
    return _rebuild(structure, iter(leaves))


def structure_of(module: str, name: str, context: Any = None, *inside: Structure | None) -> Structure:
    """The structure of the class called ``name`` in a ``module`` that is imported; nothing is imported or called.

    Raises ``StageError`` if there is no such class, or if its values are no containers.
    """
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    make = _maker(found) if isinstance(found, type) else None
    if make is None:
        how = "define it in a module that the stage imports that receives it"
        raise StageError(f"a stage sends a value of {module}.{name}, no container that another worker knows; {how}")
    return Structure(make, found, context, inside)


def leaves_of(value: Any, *, wraps: tuple[type, ...] = ()) -> list[Any]:
    """The leaves of ``value``, as ``flatten``."""
    return flatten(value, wraps=wraps)[0]


def tensors_of(value: Any, *, wraps: tuple[type, ...] = ()) -> list[Tensor]:
    """The tensors among the leaves of ``value``."""
    return [leaf for leaf in leaves_of(value, wraps=wraps) if isinstance(leaf, Tensor)]


def lost_attribute(tensor: Tensor) -> str | None:
    """The name of an attribute that Python code has given ``tensor``, and that its copies and pieces would lack.

    A class that says what its tensors are made of looks after its attributes.
    """
    if not vars(tensor) or isinstance(tensor, nn.Parameter) or hasattr(tensor, "__tensor_flatten__"):
        return None
    kept = vars(tensor.detach())
    return next((name for name in vars(tensor) if name not in kept and not name.startswith("_dynamo")), None)


def places(structure: Structure | None) -> list[str]:
    """Where each leaf is, as Python would write it: ``[0]['mask'].weight``."""
    if structure is None:
        return [""]
    make, kind, context, inside = structure
    names: Sequence[str] = [f"[{number}]" for number in range(len(inside))]
    if make is _make_dict:
        names = [f"[{key!r}]" for key in context]
    elif make is _make_named_tuple:
        names = [f".{name}" for name in kind._fields]  # type: ignore[attr-defined]
    elif make is _make_registered and isinstance(context, list) and len(context) == len(inside):
        names = [f"[{key!r}]" for key in context]  # as for the outputs of Hugging Face's models
    elif make is _make_dataclass:
        names = [f".{name}" for name in context]
    return [name + place for name, each in zip(names, inside, strict=True) for place in places(each)]


_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device}
"""Types of leaves that hold no tensor."""
_SIMPLE = _PLAIN | {Tensor, nn.Parameter}
"""Types of leaves that need no closer look."""


def _flatten(value: Any, leaves: list[Any]) -> Structure | None:
    kind = type(value)
    if kind in _SIMPLE:
        leaves.append(value)
        return None
    if (make := _maker(kind)) is None:
        leaves.append(value)
        return None
    context: Any = None
    inside: Iterable[Any] = value
    if make is _make_dict:
        context, inside = list(value), value.values()
    elif make is _make_registered:
        inside, context = SUPPORTED_NODES[kind].flatten_fn(value)
    elif make is _make_dataclass:
        attributes = _attributes(value)
        context, inside = list(attributes), attributes.values()
    return Structure(make, kind, context, tuple([_flatten(each, leaves) for each in inside]))


def _maker(kind: type) -> _Make | None:
    """What makes a container of this class; ``None`` if its values are leaves."""
    if kind is tuple or kind is list:
        return _make_sequence
    if kind is dict or kind is OrderedDict:
        return _make_dict
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _make_named_tuple
    if kind in SUPPORTED_NODES:
        return _make_registered
    return _make_dataclass if hasattr(kind, "__dataclass_fields__") and _is_plain_class(kind) else None


def _is_plain_class(kind: type) -> bool:
    """Whether ``_make_dataclass`` can make one: its ``__new__`` is that of ``object``, and it is no module."""
    new: object = kind.__new__
    return new is object.__new__ and not issubclass(kind, nn.Module)


def _attributes(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, and what else its ``__dict__`` holds."""
    found = dict(getattr(value, "__dict__", ()))
    for each in fields(value):
        if each.name not in found and hasattr(value, each.name):
            found[each.name] = getattr(value, each.name)
    return found


def _rebuild(structure: Structure | None, leaves: Iterator[Any]) -> Any:
    if structure is None:
        return next(leaves)
    make, kind, context, inside = structure
    return make(kind, context, [_rebuild(each, leaves) for each in inside])


def _make_sequence(kind: type, _: Any, values: list[Any]) -> Any:
    return values if kind is list else tuple(values)


def _make_dict(kind: type, keys: list[Any], values: list[Any]) -> Any:
    return kind(zip(keys, values, strict=True))


def _make_named_tuple(kind: type, _: Any, values: list[Any]) -> Any:
    return kind(*values)


def _make_registered(kind: type, context: Any, values: list[Any]) -> Any:
    return SUPPORTED_NODES[kind].unflatten_fn(values, context)


def _make_dataclass(kind: type, names: list[str], values: list[Any]) -> Any:
    made: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # also of a frozen one
    return made


_CONTAINERS = (list, tuple, set, frozenset, deque)
_NO_VALUES = (type, ModuleType, nn.Module)
"""Not looked into. The parameters of a module get their gradients wherever it is called."""
_EMPTY_CELL = CellType()
"""Of a variable that has no value yet."""
_DEPTH, _COUNT = 5, 1000


def _holds_tensor(value: Any) -> bool:
    """Whether there is a tensor in ``value``, at most ``_DEPTH`` levels deep and among its first ``_COUNT`` values."""
    level, seen = [value], {id(value)}
    for _ in range(_DEPTH):
        below = [inner for each in level for inner in _values_in(each) if type(inner) not in _PLAIN]
        if any(isinstance(inner, Tensor) for inner in below):
            return True
        level = [inner for inner in below if id(inner) not in seen][: _COUNT - len(seen)]
        if not level:
            return False
        seen.update(map(id, level))
    return False


def _values_in(value: Any) -> Iterator[Any]:
    if isinstance(value, _NO_VALUES):
        return
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY_CELL)
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
    elif isinstance(value, (MethodType, BuiltinMethodType)):
        yield value.__self__
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, _CONTAINERS):
        yield from value
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield getattr(value, name)
