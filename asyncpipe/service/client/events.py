"""Parses server-sent events of a response, as WHATWG's HTML standard defines them. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from asyncpipe.service.client.dialogue import BrokenExchange

__all__ = ["EventParser", "ServerEvent"]

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


class EventParser:
    """Makes events of the bytes of one response, however they are cut. An incomplete last event is none."""

    def __init__(self) -> None:
        self._line = b""
        """What has come of the line that is not yet complete."""
        self._last, self._kind, self._data = 0, "message", list[str]()

    def feed(self, content: bytes) -> Iterator[ServerEvent]:
        """The events that ``content`` completes. Raises ``BrokenExchange`` for one that is not a service's."""
        *lines, self._line = (self._line + content).split(b"\n")
        for line in lines:
            if (event := self._take(line)) is not None:
                yield event
        _check_length(self._line)

    def _take(self, line: bytes) -> ServerEvent | None:
        _check_length(line)
        text = line.decode("utf-8", "replace").rstrip("\r")
        name, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if not text:
            found = _event(self._last, self._kind, "\n".join(self._data)) if self._data else None
            self._kind, self._data = "message", []
            return found
        if name == "event":
            self._kind = value
        elif name == "data":
            self._data.append(value)
        elif name == "id" and value.isascii() and value.isdigit():
            self._last = int(value)
        return None


def _check_length(line: bytes) -> None:
    if len(line) > LONGEST_LINE:
        raise BrokenExchange(f"an event of more than {LONGEST_LINE} bytes")


def _event(number: int, kind: str, text: str) -> ServerEvent:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenExchange(f"an event that is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BrokenExchange("an event that is not a JSON object")
    at, data = found.get("at"), found.get("data")
    return ServerEvent(
        number, kind, float(at) if isinstance(at, int | float) else 0.0, data if isinstance(data, dict) else {}
    )
