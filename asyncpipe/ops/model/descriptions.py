"""What goes beside the tensors from one worker to another, as text: plain values, and how containers are made of them.

Edges carry no code, and nothing of what they carry is run: this is not pickle. ``encode`` writes JSON, in which a list
stands for what JSON does not know: first its type, then its parts. ``decode`` makes what is in ``_FORMS``, and nothing
else. The classes of containers are named by their modules; a receiver takes only those that it has imported anyway, and
that it would take apart itself (``nested.py``).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch

from asyncpipe.errors import StageError
from asyncpipe.ops.device.memory_layout import MemoryLayout
from asyncpipe.ops.model.nested import Structure, structure_of

__all__ = ["decode", "encode"]


def encode(value: object) -> bytes:
    """``value`` as text. Raises ``StageError`` if a part of it is none of the types of this module."""
    return json.dumps(_encoded(value), separators=(",", ":")).encode()


def decode(text: bytes) -> Any:
    """What ``encode`` has written. Raises some error for anything else, and ``StageError`` for an unknown class."""
    return _decoded(json.loads(text.decode()))


def _dtype(name: str) -> torch.dtype:
    if not isinstance(found := getattr(torch, name, None), torch.dtype):
        raise StageError(f"the torch {torch.__version__} of this worker has no type {name!r}")
    return found


def _structure_parts(structure: Structure) -> list[Any]:
    kind = structure.kind
    if structure_of(kind.__module__, kind.__qualname__).kind is not kind:
        raise _refused(kind)
    return [kind.__module__, kind.__qualname__, structure.context, *structure.inside]


_bounds = attrgetter("start", "stop", "step")
_CLASSES = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool)}
"""What a ``defaultdict`` may make."""
_FORMS: dict[type, tuple[Callable[[Any], Iterable[Any]], Callable[..., Any]]] = {
    tuple: (list, lambda *parts: parts),
    list: (list, lambda *parts: list(parts)),
    dict: (lambda value: value.items(), lambda *items: dict(items)),
    set: (list, lambda *parts: set(parts)),
    frozenset: (list, lambda *parts: frozenset(parts)),
    int: (lambda value: [hex(value)], lambda text: int(text, 16)),
    float: (lambda value: [struct.pack("<d", value).hex()], lambda text: struct.unpack("<d", bytes.fromhex(text))[0]),
    complex: (lambda value: [value.real, value.imag], complex),
    bytes: (lambda value: [value.decode("latin-1")], lambda text: text.encode("latin-1")),
    slice: (_bounds, slice),
    range: (_bounds, range),
    type: (lambda kind: [kind.__name__], lambda name: _CLASSES[name]),
    torch.Size: (list, lambda *parts: torch.Size(parts)),
    torch.device: (lambda value: [str(value)], torch.device),
    torch.dtype: (lambda value: [str(value).removeprefix("torch.")], _dtype),
    MemoryLayout: (list, MemoryLayout),
    Structure: (_structure_parts, structure_of),
}
"""By type: its parts, which are values themselves, and how it is made of them."""
_MAKERS = {kind.__name__: make for kind, (_, make) in _FORMS.items()}
_OF_JSON = {type(None), bool, str}


def _encoded(value: Any) -> Any:
    kind = type(value)
    if kind in _OF_JSON or (kind is int and abs(value) < 1 << 64) or (kind is float and math.isfinite(value)):
        return value
    if kind not in _FORMS or (kind is type and value not in _CLASSES.values()):
        raise _refused(kind)
    return [kind.__name__, *map(_encoded, _FORMS[kind][0](value))]


def _decoded(value: Any) -> Any:
    return _MAKERS[value[0]](*map(_decoded, value[1:])) if isinstance(value, list) else value


def _refused(kind: type) -> StageError:
    how = "send tensors, numbers, strings and containers of them, or put both stages on one worker"
    return StageError(f"a stage sends a {kind.__module__}.{kind.__qualname__}, which edges do not carry; {how}")
