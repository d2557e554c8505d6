"""All or nothing: what a failed step has added to the gradients does not stay."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

__all__ = ["GradientGuard"]


class GradientGuard:
    """Sets earlier gradients aside while a step makes its own, then adds them up or puts them back.

    Costs nothing after ``zero_grad()``; when gradients are accumulated over steps, memory for a second set of
    gradients. Used on the caller's thread and streams, inside the step's fence.
    """

    def __init__(self) -> None:
        self._before: list[tuple[nn.Parameter, Tensor | None]] = []

    def set_aside(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begin: no parameter has a gradient. What an interrupt cuts short, ``roll_back`` can still undo."""
        for parameter in parameters:
            self._before.append((parameter, parameter.grad))
            parameter.grad = None

    def commit(self) -> None:
        """The step went well: earlier gradients plus the new ones, in the earlier tensors."""
        for parameter, before in self._before:
            if before is not None:
                if parameter.grad is not None:
                    before += parameter.grad
                parameter.grad = before

    def roll_back(self) -> None:
        """The step failed: the gradients are what they were before it."""
        for parameter, before in self._before:
            parameter.grad = before
