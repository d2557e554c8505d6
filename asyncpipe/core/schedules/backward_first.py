"""Backward first: a ready backward runs before any forward (SageMaker's "interleaved" pipeline).

C. Karakus et al., Amazon SageMaker Model Parallelism, 2021 (arXiv 2111.05972).
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncpipe.core.checks import check_positive
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.schedules.protocol import Action, RuledSchedule, Shape, demand_even_stages

__all__ = ["BackwardFirst"]


@dataclass(frozen=True)
class BackwardFirst(RuledSchedule):
    """A rule, not an order: backwards before forwards, with a cap on the micro-batches of a device.

    The bubble depends on timing and has no closed form; with even stages and free copies it is that of 1F1B,
    (p-1)(t_F + t_B). Peak ``cap`` micro-batches on every device, p by default. Any m; any number of stages that is a
    multiple of p. With a cap of p - r on device r it would be 1F1B, decided at run time.
    """

    cap: int | None = None

    name = "backward-first"

    def __post_init__(self) -> None:
        if self.cap is not None:
            check_positive("cap", self.cap)

    def check(self, shape: Shape) -> None:
        demand_even_stages(self.name, shape)

    def priority(self, action: Action, shape: Shape) -> tuple[bool, int]:
        return action.kind is TaskKind.FORWARD, action.microbatch

    def admit(self, action: Action, live: int, shape: Shape) -> bool:
        return live < (shape.devices if self.cap is None else self.cap)
