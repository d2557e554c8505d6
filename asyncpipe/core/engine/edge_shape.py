"""How an edge between two workers is made worse than it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from asyncpipe.errors import OptionError

__all__ = ["EdgeShape", "EdgeState"]


class EdgeState(StrEnum):
    """Whether an edge carries messages."""

    OPEN = "open"
    BLACK_HOLE = "black_hole"
    """What is sent does not arrive, and nobody is told: until it is open again."""
    CUT = "cut"
    """Its connection is closed; both ends are told. It stays so until the pipeline opens anew."""


@dataclass(frozen=True, slots=True)
class EdgeShape:
    """A directed edge that is slower than it is, or does not work, for tests and measurements.

    A message arrives when all its bytes have passed at the ``bandwidth``, behind those before it, and then so many
    seconds of ``latency`` later; but not before it has arrived in fact.
    """

    latency: float = 0.0
    """Seconds, in one direction."""
    bandwidth: float = math.inf
    """Bytes of tensors a second."""
    state: EdgeState = EdgeState.OPEN

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency) and self.latency >= 0 and self.bandwidth > 0):
            raise OptionError(
                f"an edge's latency is a number of seconds, 0 or more, and its bandwidth one of bytes a second, more "
                f"than 0; got {self.latency} and {self.bandwidth}"
            )

    def passed(self, at: float, size: int, free: float) -> float:
        """When ``size`` bytes that are there ``at`` have passed, on an edge that is ``free`` then; latency follows."""
        return max(at, free) + size / self.bandwidth
