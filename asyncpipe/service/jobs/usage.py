"""What users have used of the devices: device seconds, of which half are forgotten after each half-life. Pure.

A second on a device at time s counts 2^-((now - s) / half_life) now, so a run on d devices from b to e counts
d * half_life / ln 2 * (2^-((now - e) / half_life) - 2^-((now - b) / half_life)). Runs count while they go on, and from
their beginning as if each of their devices had been used for ``AHEAD`` of a half-life before: a user who has used a
second less than another does not get all devices at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import log
from types import MappingProxyType

__all__ = ["AHEAD", "HALF_LIFE", "Usage"]

HALF_LIFE = 7 * 86400.0
AHEAD = 1 / 1024
"""Of a half-life: ten minutes of a week."""


class Usage:
    """The device seconds of users; ``None`` is the user of all jobs that have no owner."""

    def __init__(self, half_life: float = HALF_LIFE, shares: Mapping[str, float] = MappingProxyType({})) -> None:
        """A user with a share of 2 may use twice as much as one with 1, which is that of users not in ``shares``."""
        self._half_life = half_life
        self._shares = shares
        self._past: dict[str | None, tuple[float, float]] = {}
        """By user, what has been used by a time, and that time."""
        self._running: defaultdict[str | None, dict[str, tuple[int, float]]] = defaultdict(dict)
        """By user and job, the number of devices, and since when."""

    def begin(self, user: str | None, job: str, devices: int, at: float) -> None:
        """A run of ``job`` has begun on so many devices."""
        self._running[user][job] = devices, at

    def end(self, user: str | None, job: str, at: float) -> None:
        """The run of ``job`` has ended, if there is one."""
        if (run := self._running[user].pop(job, None)) is not None:
            past, since = self._past.get(user, (0.0, at))
            now = max(at, since)  # Runs that another process has left come in any order.
            self._past[user] = past * self._left(now - since) + self._of_run(*run, at) * self._left(now - at), now

    def used(self, user: str | None, now: float) -> float:
        """The device seconds that count ``now``."""
        past, since = self._past.get(user, (0.0, now))
        running = self._running.get(user, {}).values()
        return past * self._left(now - since) + sum(self._of_run(*run, now) for run in running)

    def rank(self, user: str | None, now: float) -> float:
        """How much of the devices ``user`` has had, by its share; who has had less comes before who has had more.

        One more device makes it higher by 1, divided by the share.
        """
        ahead = sum(devices for devices, _ in self._running.get(user, {}).values())
        return (self.used(user, now) / (AHEAD * self._half_life) + ahead) / self.share(user)

    def share(self, user: str | None) -> float:
        """The share of ``user``."""
        return self._shares.get(user or "", 1.0)

    def _of_run(self, devices: int, began: float, now: float) -> float:
        return devices * self._half_life / log(2) * (1 - self._left(now - began))

    def _left(self, seconds: float) -> float:
        """What is left of a second ``seconds`` later; a clock that was set back changes nothing."""
        return float(2.0 ** -(max(seconds, 0.0) / self._half_life))
