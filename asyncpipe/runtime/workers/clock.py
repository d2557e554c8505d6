"""The offset of another process's clock, from round trips."""

from __future__ import annotations

from collections import deque

__all__ = ["ClockOffset"]

ROUND_TRIPS = 120
"""How many round trips count. Older ones are forgotten, since clocks of two hosts drift apart."""


class ClockOffset:
    """Estimates what another clock shows, minus what the own one shows. The shortest round trip is the most exact."""

    def __init__(self) -> None:
        self._trips: deque[tuple[float, float]] = deque(maxlen=ROUND_TRIPS)
        """(half its seconds, offset in its middle) of each round trip."""
        self.round_trips = 0
        """How many there were."""

    def add(self, sent: float, theirs: float, received: float) -> None:
        """A round trip in seconds: own clock, the other clock in between, own clock."""
        self.round_trips += 1
        self._trips.append(((received - sent) / 2, theirs - (sent + received) / 2))

    @property
    def half_trip(self) -> float:
        """How far the estimate may be off, in seconds; infinite before the first round trip."""
        return min(self._trips)[0] if self._trips else float("inf")

    @property
    def offset(self) -> float:
        """Seconds to take off the other clock's times. 0 where the shortest round trip does not tell it from 0.

        This is exact where the two processes share a clock, as those of one machine do.
        """
        if not self._trips:
            return 0.0
        half, offset = min(self._trips)
        return 0.0 if abs(offset) <= half else offset
