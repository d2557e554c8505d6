"""Hosts that jobs are to leave, and what changes and is watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["DrainedHosts", "Watchable"]


class Watchable:
    """Something that changes, and tells those who watch it."""

    def __init__(self) -> None:
        self._watchers: list[Callable[[], object]] = []

    def watch(self, changed: Callable[[], object]) -> Callable[[], object]:
        """Have ``changed`` called at each change, until what this returns is called."""
        self._watchers.append(changed)
        return lambda: self._watchers.remove(changed)

    def announce(self) -> None:
        """Call all that watch."""
        for changed in tuple(self._watchers):
            changed()


class DrainedHosts(Watchable):
    """Which hosts jobs are to leave, or to use again."""

    def __init__(self, others: Sequence[str] = ()) -> None:
        """``others`` are the devices that the stages of drained hosts may go to."""
        super().__init__()
        self.others = tuple(others)
        self.units: frozenset[str] = frozenset()
        """The hosts; a worker that names none is one by itself."""

    def __contains__(self, unit: str) -> bool:
        return unit in self.units

    def set(self, units: frozenset[str]) -> None:
        """Have jobs leave ``units``, and use all others."""
        self.units = units
        self.announce()
