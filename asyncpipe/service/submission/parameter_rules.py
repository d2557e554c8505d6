"""Which parameters clients may set, by their annotations, and which values are refused whatever the annotation.

The rules are lists of what is allowed: a parameter with a type that is not listed here cannot be set by clients.
"""

from __future__ import annotations

import re
import types
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from asyncpipe.train.validation import WrongKey

__all__ = ["can_be_given", "unsafe_text", "unsafe_values"]

SCALARS = (bool, int, float, str, type(None))
CONTAINERS = (list, tuple, dict, set, frozenset, Sequence, Mapping)
WRAPPERS = (Union, types.UnionType, *CONTAINERS)
LONGEST_TEXT = 4096
LARGEST = 2**63 - 1
DEEPEST = 16
MOST_PROBLEMS = 10

_URL = re.compile(r"[A-Za-z][\w+.-]*:[/\\]")
"""Also matches a Windows drive."""


def can_be_given(annotation: Any) -> bool:
    """Whether JSON can express values of ``annotation``, and none of them is a file, code or another object."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return can_be_given(get_args(annotation)[0])
    if origin is Literal:
        return all(isinstance(value, SCALARS) for value in get_args(annotation))
    if origin in WRAPPERS:
        return all(part is Ellipsis or can_be_given(part) for part in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return all(isinstance(member.value, SCALARS) for member in annotation)
    return annotation in SCALARS


def unsafe_values(key: str, value: object) -> Iterator[WrongKey]:
    """The first ``MOST_PROBLEMS`` unsafe parts of ``value``, which is at the key ``key``."""
    return islice(_unsafe(key, value, 0), MOST_PROBLEMS)


def _unsafe(key: str, value: object, depth: int) -> Iterator[WrongKey]:
    if depth > DEEPEST:
        yield WrongKey(key, f"must not be nested deeper than {DEEPEST}")
    elif isinstance(value, str):
        if problem := unsafe_text(value):
            yield WrongKey(key, problem)
    elif isinstance(value, int):
        if abs(value) > LARGEST:
            yield WrongKey(key, f"must be a number from -{LARGEST} to {LARGEST}")
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if problem := unsafe_text(str(name)):
                yield WrongKey(key, f"has a key that is not allowed: it {problem}")
            else:
                yield from _unsafe(f"{key}.{name}"[:200], inner, depth + 1)
    elif isinstance(value, Sequence):
        for index, inner in enumerate(value):
            yield from _unsafe(f"{key}[{index}]", inner, depth + 1)


def unsafe_text(text: str) -> str | None:
    """Why ``text`` is refused, or ``None``. As a path, it could leave the working directory; in a log, add lines.

    ``org/model`` is allowed; the operator decides what an entry opens by such names.
    """
    bare = text.strip()
    if len(text) > LONGEST_TEXT:
        return f"must have at most {LONGEST_TEXT} characters"
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in text):
        return "must be printable, in one line"
    if "\\" in text or bare.startswith(("/", "~")) or _URL.match(bare):
        return "must not look like a path: no backslash, no URL, no / or ~ at its start"
    if any(part.strip() == ".." for part in text.split("/")):
        return 'must not look like a path: no ".." in it'
    return None
