"""Parses server-sent events of a response, as WHATWG's HTML standard defines them. Pure."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from asyncpipe.service.client.asking import BrokenExchange

__all__ = ["ServerEvent", "events_of"]

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


async def events_of(content: AsyncIterator[bytes]) -> AsyncIterator[ServerEvent]:
    """The events in the bytes of one response, however they are cut; an incomplete last event is none.

    Raises ``BrokenExchange`` for one that is not a service's.
    """
    number, kind, data, rest = 0, "message", list[str](), b""
    async for chunk in content:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > LONGEST_LINE:
            raise BrokenExchange(f"an event of more than {LONGEST_LINE} bytes")
        for line in lines:
            text = line.decode("utf-8", "replace").rstrip("\r")
            name, _, value = text.partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                kind = value
            elif name == "data":
                data.append(value)
            elif name == "id" and value.isascii() and value.isdigit():
                number = int(value)
            elif not text:
                if data:
                    yield _event(number, kind, "\n".join(data))
                kind, data = "message", []


def _event(number: int, kind: str, text: str) -> ServerEvent:
    try:
        found = json.loads(text)
        return ServerEvent(number, kind, float(found.get("at", 0.0)), dict(found.get("data", {})))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenExchange(f"an event that is not a JSON object of a service: {error}") from error
