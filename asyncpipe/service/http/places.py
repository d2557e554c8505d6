"""The places that connections have, so that a flood of them keeps out neither clients nor probes.

::

    a new connection ──▶ a place is free ───────────────────────────▶ served
                     └─▶ one that asks nothing has a place ─────────▶ gives way: first those that never asked
                     └─▶ all clients are being answered ────────────▶ one of the PROBES places beyond them:
                                                                      served if it asks for a probe, else 503;
                                                                      the oldest there gives way to the next

So a place is held by asking what may be asked and being answered, and not by being connected: who has no token has a
place only until somebody else needs it. A probe asks at once: it has its answer
long before PROBES others have come after it.
"""

from __future__ import annotations

from typing import Protocol

from asyncpipe.service.descriptors import PROBES

__all__ = ["Connected", "Places"]


class Connected(Protocol):
    """A connection."""

    def give_way(self) -> None:
        """End, since another one needs the place."""

    def turn_away(self) -> None:
        """Say that there is no place, and end."""


class Places:
    """The connections of one server: at most ``most`` of clients, and ``PROBES`` that may be probes'."""

    def __init__(self, most: int, probes: int = PROBES) -> None:
        self._most = most
        self._most_probes = probes
        # Dicts are sets that keep an order: who came first is first.
        self._silent: dict[Connected, None] = {}
        """Have asked nothing yet that they may ask."""
        self._idle: dict[Connected, None] = {}
        """Have been answered."""
        self._answered: dict[Connected, None] = {}
        """Are being answered."""
        self._probes: dict[Connected, None] = {}

    def came(self, connection: Connected) -> bool:
        """Whether the new ``connection`` has a client's place; else it has a probe's."""
        if len(self._silent) + len(self._idle) + len(self._answered) >= self._most:
            who = self._silent or self._idle
            if not who:
                self._hold_for_probe(connection)
                return False
            first = next(iter(who))
            del who[first]
            first.give_way()
        self._silent[connection] = None
        return True

    def asks(self, connection: Connected) -> None:
        """A request of ``connection`` may be answered, and is."""
        if connection in self._silent or connection in self._idle:
            self._silent.pop(connection, None)
            self._idle.pop(connection, None)
            self._answered[connection] = None

    def rests(self, connection: Connected) -> None:
        """``connection`` has been answered."""
        if connection in self._answered:
            del self._answered[connection]
            self._idle[connection] = None

    def left(self, connection: Connected) -> None:
        """``connection`` has ended."""
        for places in (self._silent, self._idle, self._answered, self._probes):
            places.pop(connection, None)

    def _hold_for_probe(self, connection: Connected) -> None:
        if len(self._probes) >= self._most_probes:
            first = next(iter(self._probes))
            del self._probes[first]
            first.turn_away()
        self._probes[connection] = None
