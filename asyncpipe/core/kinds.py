"""The kinds of tasks."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["TaskKind"]


class TaskKind(StrEnum):
    """What a task does; the value is the letter used in schedules, journals and pictures."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    COPY = "C"
    UPDATE = "U"
    SUM = "S"
    """Adds the gradients of a tied parameter's replicas to its own."""
