"""Parses server-sent events of a response, as WHATWG's HTML standard defines them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Any

__all__ = ["ServerEvent", "read_events"]

LONGEST_LINE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event of a job."""

    id: int
    """Increases from event to event; a step has the id of the event before it."""
    kind: str
    """``state``, ``note``, ``snapshot`` or ``step``."""
    at: float
    """Unix time."""
    data: dict[str, Any] = field(default_factory=dict)


def read_events(response: HTTPResponse) -> Iterator[ServerEvent]:
    """The events of ``response`` until it ends, without an incomplete last one.

    Raises ``HTTPException`` for an event that is not a service's.
    """
    last, kind, data = 0, "message", list[str]()
    while line := response.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise HTTPException(f"an event of more than {LONGEST_LINE} bytes")
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        name, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if not text:
            if data:
                yield _event(last, kind, "\n".join(data))
            kind, data = "message", []
        elif name == "event":
            kind = value
        elif name == "data":
            data.append(value)
        elif name == "id" and value.isascii() and value.isdigit():
            last = int(value)


def _event(number: int, kind: str, text: str) -> ServerEvent:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise HTTPException(f"an event that is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise HTTPException("an event that is not a JSON object")
    at, data = found.get("at"), found.get("data")
    return ServerEvent(
        number, kind, float(at) if isinstance(at, int | float) else 0.0, data if isinstance(data, dict) else {}
    )
