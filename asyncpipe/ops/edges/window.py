"""How many messages a receiver may hold: the arithmetic of credits."""

from __future__ import annotations

__all__ = ["Window"]


class Window:
    """Counts messages at the receiver. Pure; its owner locks.

    The sender is told a limit, the number of messages that it may have sent in all. It is told again when half the
    window is free, or at once if it has reached what it was told: so the receiver never holds more than ``size``
    messages, the sender never waits while there is room, and most releases send nothing.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._arrived = 0
        self._released = 0
        self._told = 0

    @property
    def limit(self) -> int:
        return self._released + self.size

    @property
    def told(self) -> int:
        """The limit that the sender was told."""
        return self._told

    def arrive(self) -> bool:
        """Whether this message was allowed."""
        self._arrived += 1
        return self._arrived <= self._told

    def release(self, count: int = 1) -> None:
        self._released += count

    def due(self) -> bool:
        """Whether the sender must be told the limit now."""
        more = self.limit - self._told
        return more >= max(1, self.size // 2) or (more > 0 and self._arrived >= self._told)

    def tell(self) -> int:
        """The limit, which the sender is told now."""
        self._told = max(self._told, self.limit)
        return self._told
