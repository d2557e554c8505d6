"""Reading input that people write: TOML files, strict pydantic models, and one readable line for each wrong key.

A field's ``description`` says what its value must be, and error messages quote it. The input may come from anyone:
keys and values are escaped and cut to one short line, and the number of reported problems is limited.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from asyncpipe.core.checks import similar
from asyncpipe.errors import AsyncpipeError

__all__ = [
    "StrictModel",
    "WrongKey",
    "adapter_wrong_keys",
    "explained",
    "read_toml",
    "set_key",
    "shown",
    "wrong_keys",
]

MAX_PROBLEMS = 20
MAX_SUGGESTIONS = 5
"""Unknown keys for which a known one is suggested: that takes longer than all else, and anyone may send many."""
MAX_SHOWN = 60
"""Characters of a key or a value that a message shows."""


class StrictModel(BaseModel):
    """A table of input: frozen, no conversion between types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class WrongKey(NamedTuple):
    """One wrong key: its dotted path (``training.steps``), and what is wrong with it and what would be right."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


def read_toml(path: Path, error_type: Callable[[str], AsyncpipeError]) -> dict[str, Any]:
    """The tables of the TOML file at ``path``; raises an ``error_type`` that names the file if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise error_type(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise error_type(f"{path}: is not UTF-8: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise error_type(f"{path}: is not valid TOML: {error}") from error


def set_key(tables: dict[str, Any], key: str, value: object) -> bool:
    """Set the value at a dotted ``key``; ``None`` removes it. False if the key leads through what is no table."""
    *path, last = key.split(".")
    for name in path:
        following = tables.setdefault(name, {})
        if not isinstance(following, dict):
            return False
        tables = following
    if value is None:
        tables.pop(last, None)
    else:
        tables[last] = value
    return bool(last)


def wrong_keys(error: ValidationError, model: type[BaseModel], secret: Sequence[str] = ()) -> list[WrongKey]:
    """The wrong keys of ``model`` that ``error`` reports: the first ``MAX_PROBLEMS``, then how many more there are.

    Values of the fields in ``secret`` are never shown.
    """
    details = error.errors(include_url=False)
    # Pydantic reports each alternative of a union; their explanations are equal and become one.
    told = (
        explained(detail, model, secret, suggests=number < MAX_SUGGESTIONS)
        for number, detail in enumerate(details[:MAX_PROBLEMS])
    )
    problems = list(dict.fromkeys(told))
    if len(details) > MAX_PROBLEMS:
        problems.append(WrongKey("", f"and {len(details) - MAX_PROBLEMS} more"))
    return problems


def adapter_wrong_keys(error: ValidationError, top: str, given: object) -> list[WrongKey]:
    """The wrong keys of ``given``, a value at the key ``top`` that a ``TypeAdapter`` without descriptions has read."""
    messages: dict[str, dict[str, None]] = {}
    got: dict[str, str] = {}
    for detail in error.errors(include_url=False)[:MAX_PROBLEMS]:
        key = _dotted((top, *_place_in(given, detail)))
        # Each alternative of a union has its own message about the same value.
        messages.setdefault(key, {})[_uncapitalized(detail["msg"])] = None
        got[key] = "" if detail["type"] == "missing" else f", got {shown(detail['input'])}"
    return [WrongKey(key, " or ".join(found) + got[key]) for key, found in messages.items()]


def _place_in(given: object, detail: ErrorDetails) -> Iterator[int | str]:
    """The path to the wrong value inside ``given``, without pydantic's names for the alternatives of a union."""
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
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def explained(
    detail: ErrorDetails, model: type[BaseModel], secret: Sequence[str] = (), *, suggests: bool = True
) -> WrongKey:
    """The wrong key of ``model`` that one of pydantic's errors is about."""
    place = detail["loc"]
    table, field, depth = _find(model, place)
    # Pydantic appends "[key]" when the key of a dict is wrong, and not its value.
    key = _dotted(place[:-1] if place[-1:] == ("[key]",) else place)
    if detail["type"] == "extra_forbidden":
        known = list(table.model_fields)
        where = f" of {_dotted(place[:-1])}" if place[:-1] else ""
        suggestion = similar(str(place[-1]), known) if suggests else ""
        return WrongKey(key, f"unknown key; {suggestion}known keys{where}: {', '.join(known)}")
    if detail["type"] == "value_error":
        allowed = str(detail["ctx"]["error"])
    elif field is not None and (description := _description(field)):
        allowed = description
        # The description is about the whole field, so the key is the field's, with the index of a wrong item.
        indexed = depth + 1 if place[depth : depth + 1] and isinstance(place[depth], int) else depth
        key = _dotted(place[:indexed])
    elif field is not None and (inner := _table_of(field)) is not None and depth == len(place):
        allowed = f"must be a table with the keys {', '.join(inner.model_fields)}"
    else:
        allowed = _uncapitalized(detail["msg"])
    if detail["type"] == "missing":
        return WrongKey(key, f"missing; {allowed}")
    if detail["type"] == "json_invalid" or not place or place[0] in secret:
        return WrongKey(key, allowed)
    return WrongKey(key, f"{allowed}, got {shown(detail['input'])}")


def _find(model: type[BaseModel], place: Sequence[int | str]) -> tuple[type[BaseModel], FieldInfo | None, int]:
    """The innermost table on the path ``place``, its field there, and how many parts of the path lead to the field."""
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
    """The model that ``field`` holds, if it is a table, also where it is optional."""
    annotation: Any = field.annotation
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _description(field: FieldInfo) -> str | None:
    """The field's description, or the one of the annotated type that an optional field holds."""
    annotations = (part for kind in get_args(field.annotation) for part in getattr(kind, "__metadata__", ()))
    inner = (part.description for part in annotations if isinstance(part, FieldInfo))
    return field.description or next(filter(None, inner), None)


def _dotted(place: Sequence[int | str]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{_safe(part)}" for part in place)
    return "".join(parts).removeprefix(".")


def _safe(key: str) -> str:
    """``key`` as it is, if it is plain, else as JSON has it."""
    return key if key.isascii() and key.isprintable() and len(key) <= MAX_SHOWN else shown(key)


def _uncapitalized(message: str) -> str:
    return message[:1].lower() + message[1:]
