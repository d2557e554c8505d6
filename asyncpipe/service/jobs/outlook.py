"""What is known of a job beside its record: how fast it goes, when it will be done, and for what it waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

__all__ = ["Outlook", "Pace"]

RECENT = 20
"""Speeds are means over this many last steps."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """Figures of a job that change while nothing happens to it; ``None`` does not apply, or is not known yet."""

    waits_for: str | None = None
    """Why a queued job has not started, or for which lost workers a running one waits."""
    place: int | None = None
    """Of a queued job in the queue, from 1."""
    trained_seconds: float = 0.0
    """How long it has been running in all, pauses and queues excluded."""
    waited_seconds: float = 0.0
    """How long it has been queued in all."""
    loss: float | None = None
    """Of its last step."""
    steps_per_second: float | None = None
    tokens_per_second: float | None = None
    left_seconds: float | None = None
    """Until a running job is done, at its speed of now."""


@dataclass(slots=True)
class Pace:
    """The speed of a run over its last steps."""

    steps: int
    """Of the whole job."""
    _recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT))
    _done: int = 0

    def add(self, step: int, seconds: float, tokens: int) -> None:
        """Step number ``step`` took ``seconds`` for ``tokens``."""
        self._done = step
        self._recent.append((seconds, tokens))

    @property
    def has_begun(self) -> bool:
        """Whether a step was done."""
        return bool(self._recent)

    def outlook(self, waits_for: str | None) -> Outlook:
        """What is known of the running job, which waits for lost workers if ``waits_for`` says so."""
        seconds, tokens = (sum(values) for values in zip(*self._recent, strict=True)) if self._recent else (0.0, 0)
        if not 0 < seconds < inf:
            return Outlook(waits_for=waits_for)
        speed = len(self._recent) / seconds
        left = max(self.steps - self._done, 0) / speed
        return Outlook(
            waits_for=waits_for,
            steps_per_second=speed,
            tokens_per_second=tokens / seconds if tokens else None,
            left_seconds=left,
        )
