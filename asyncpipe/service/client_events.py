"""Parses server-sent events of a response, as WHATWG's HTML standard defines them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Any

__all__ = ["EventReader", "ServerEvent"]

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


class EventReader:
    """Iterates over the events of a response until it ends; drops an incomplete last event.

    Raises ``HTTPException`` for an event that is not a service's.
    """

    def __init__(self, response: HTTPResponse) -> None:
        self._response = response
        self._last = 0

    def __iter__(self) -> Iterator[ServerEvent]:
        kind, data = "message", list[str]()
        while line := self._response.readline(LONGEST_LINE + 1):
            if len(line) > LONGEST_LINE:
                raise HTTPException(f"an event of more than {LONGEST_LINE} bytes")
            text = line.decode("utf-8", "replace").rstrip("\r\n")
            name, _, value = text.partition(":")
            value = value.removeprefix(" ")
            if not text:
                if data:
                    yield self._event(kind, "\n".join(data))
                kind, data = "message", []
            elif name == "event":
                kind = value
            elif name == "data":
                data.append(value)
            elif name == "id" and value.isascii() and value.isdigit():
                self._last = int(value)

    def _event(self, kind: str, text: str) -> ServerEvent:
        try:
            found = json.loads(text)
        except ValueError as error:
            raise HTTPException(f"an event that is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise HTTPException("an event that is not a JSON object")
        inner = found.get("data", {})
        at = found.get("at", 0.0)
        data = inner if isinstance(inner, dict) else {}
        return ServerEvent(self._last, kind, float(at) if isinstance(at, int | float) else 0.0, data)
