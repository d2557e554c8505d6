"""Cost models: the virtual seconds of each task. A cost model is called with a task."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpipe.core.task import Task, TaskKind

__all__ = ["Costs"]


@dataclass(frozen=True, slots=True)
class Costs:
    """A cost model: the same virtual seconds for every task of a kind.

    A full backward costs its two halves unless ``backward`` is given. Updates and sums (U, S) cost nothing.
    """

    forward: float = 1.0
    backward: float | None = None
    recompute: float = 1.0
    copy: float = 0.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0

    @property
    def full_backward(self) -> float:
        """The virtual seconds of B."""
        return self.input_gradient + self.weight_gradient if self.backward is None else self.backward

    def __call__(self, task: Task) -> float:
        """The virtual seconds of ``task``."""
        match task.kind:
            case TaskKind.FORWARD:
                return self.forward
            case TaskKind.BACKWARD:
                return self.full_backward
            case TaskKind.INPUT_GRADIENT:
                return self.input_gradient
            case TaskKind.WEIGHT_GRADIENT:
                return self.weight_gradient
            case TaskKind.RECOMPUTE:
                return self.recompute
            case TaskKind.COPY:
                return self.copy
            case _:
                return 0.0
