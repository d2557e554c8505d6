"""What pydantic found wrong, key by key, in the words of the fields' own descriptions.

What is wrong may come from outside, from anyone: keys and values are shown escaped and cut to one short line, and there
is an end to how many of them are told.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

__all__ = ["WrongKey", "adapter_wrong_keys", "shown", "similar", "wrong_keys"]

MOST_TOLD = 20
LONGEST = 60
"""Characters of a key or a value that are shown."""


class WrongKey(NamedTuple):
    """One key that is wrong: where it is (``training.steps``), and what is wrong and would be right."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


def wrong_keys(error: ValidationError, model: type[BaseModel], secret: Sequence[str] = ()) -> list[WrongKey]:
    """What ``error`` says of the keys of ``model``, the first ``MOST_TOLD`` of them and how many more there are.

    Values of the fields in ``secret`` are never shown.
    """
    details = error.errors(include_url=False)
    told = [_explained(detail, model, secret) for detail in details[:MOST_TOLD]]
    # An alternative of a union gives an error each; what is told of them is the same.
    found = list(dict.fromkeys(told))
    if len(details) > MOST_TOLD:
        found.append(WrongKey("", f"and {len(details) - MOST_TOLD} more"))
    return found


def adapter_wrong_keys(error: ValidationError, top: str, given: object) -> list[WrongKey]:
    """The same of values without described fields: ``given``, which stands below the key ``top``."""
    told: dict[str, dict[str, None]] = {}
    got: dict[str, str] = {}
    for detail in error.errors(include_url=False)[:MOST_TOLD]:
        place = _dotted((top, *_place_in(given, detail)))
        message = detail["msg"]
        # Each alternative of a union has something to say about the same value.
        told.setdefault(place, {})[f"{message[:1].lower()}{message[1:]}"] = None
        got[place] = "" if detail["type"] == "missing" else f", got {shown(detail['input'])}"
    return [WrongKey(place, " or ".join(messages) + got[place]) for place, messages in told.items()]


def _place_in(given: object, detail: ErrorDetails) -> Iterator[int | str]:
    """The way to what is wrong in ``given``, without what pydantic calls the alternatives of a union."""
    for part in detail["loc"]:
        try:
            given = given[part]  # type: ignore[index]
        except (LookupError, TypeError):
            if detail["type"] != "missing":
                continue
        yield part


def shown(value: object) -> str:
    """``value`` about as a file has it: ASCII, without control characters, cut to one short line."""
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):  # A number of thousands of digits, or a container that holds itself.
        text = f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def similar(wrong: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """``did you mean 'name'? ``, or nothing where no name of ``known`` is like ``wrong``."""
    close = get_close_matches(wrong[:LONGEST], list(known), n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}? " if close else ""


def _explained(detail: ErrorDetails, model: type[BaseModel], secret: Sequence[str]) -> WrongKey:
    place = detail["loc"]
    table, field, depth = _find(model, place)
    # Pydantic's way to say that the key of a dict is meant, and not its value.
    key = _dotted(place[:-1] if place[-1:] == ("[key]",) else place)
    if detail["type"] == "extra_forbidden":
        known = list(table.model_fields)
        where = f" of {_dotted(place[:-1])}" if place[:-1] else ""
        return WrongKey(key, f"unknown key; {similar(str(place[-1]), known)}known keys{where}: {', '.join(known)}")
    if detail["type"] == "value_error":
        allowed = str(detail["ctx"]["error"])
    elif field is not None and field.description:
        allowed = field.description
        # A description is of the whole field, whatever part of it is wrong.
        key = _dotted(place[:depth])
    elif field is not None and (inner := _table_of(field)) is not None and depth == len(place):
        allowed = f"must be a table with the keys {', '.join(inner.model_fields)}"
    else:
        message = detail["msg"]
        allowed = message[:1].lower() + message[1:]
    if detail["type"] == "missing":
        return WrongKey(key, f"missing; {allowed}")
    if detail["type"] == "json_invalid" or not place or place[0] in secret:
        return WrongKey(key, allowed)
    return WrongKey(key, f"{allowed}, got {shown(detail['input'])}")


def _find(model: type[BaseModel], place: Sequence[int | str]) -> tuple[type[BaseModel], FieldInfo | None, int]:
    """The innermost table on the way to ``place``, the field of it there, and how much of the way leads to it."""
    table, field, depth = model, None, 0
    for name in place:
        if not isinstance(name, str) or name not in table.model_fields:
            break
        field, depth = table.model_fields[name], depth + 1
        inner = _table_of(field)
        if inner is None:
            break
        if depth < len(place):
            table, field = inner, None
    return table, field, depth


def _table_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model that ``field`` holds, if it is a table."""
    annotation: Any = field.annotation
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _dotted(place: Sequence[int | str]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{_safe(part)}" for part in place)
    return "".join(parts).removeprefix(".")


def _safe(key: str) -> str:
    """``key`` as it is, if it is plain, else as JSON has it."""
    return key if key.isascii() and key.isprintable() and len(key) <= LONGEST else shown(key)
