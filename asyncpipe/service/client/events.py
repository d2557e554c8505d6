"""Parses server-sent events of a response, as WHATWG's HTML standard defines them. Pure."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from asyncpipe.service.client.asking import BrokenExchange

__all__ = ["ServerEvent", "events_of"]


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
    rest = b""
    async for chunk in content:
        *blocks, rest = (rest + chunk).split(b"\n\n")
        for block in blocks:
            fields = dict(line.partition(": ")[::2] for line in block.decode("utf-8", "replace").split("\n"))
            if "data" in fields:
                yield _event(fields.get("event", ""), fields["data"])


def _event(kind: str, text: str) -> ServerEvent:
    try:
        found = json.loads(text)
        return ServerEvent(int(found.get("id", 0)), kind, float(found.get("at", 0.0)), dict(found.get("data", {})))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenExchange(f"an event that is not a JSON object of a service: {error}") from error
