"""Which micro-batches are recomputed."""

from __future__ import annotations

from enum import StrEnum

from asyncpipe.core.checks import check_choice

__all__ = ["CheckpointMode"]


class CheckpointMode(StrEnum):
    """Which micro-batches drop their activations after the forward and recompute them before the backward."""

    ALWAYS = "always"
    EXCEPT_LAST = "except_last"
    SELECTIVE = "selective"
    """All are recomputed, except for products, convolutions and attention, whose outputs are kept."""
    NEVER = "never"

    @classmethod
    def parse(cls, value: str) -> CheckpointMode:
        """The mode called ``value``; raises ``OptionError`` that lists the modes."""
        check_choice("checkpoint", value, [mode.value for mode in cls])
        return cls(value)

    def recomputes(self, microbatch: int, microbatches: int) -> bool:
        """Whether ``microbatch`` is recomputed, of the ``microbatches`` that the mini-batch was really cut into."""
        if self is CheckpointMode.EXCEPT_LAST:
            return microbatch < microbatches - 1
        return self is not CheckpointMode.NEVER
