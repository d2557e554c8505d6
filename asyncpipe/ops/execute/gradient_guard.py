"""A failed step leaves the gradients of the parameters as they were before it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from torch import Tensor, nn

from asyncpipe.errors import BackwardError

__all__ = ["GradientGuard"]


class GradientGuard:
    """Sets earlier gradients aside while a step makes new ones; then adds them to the new ones, or restores them.

    A pipeline has one. It costs nothing after ``zero_grad()``, and memory for a second set of gradients where gradients
    are accumulated over steps. Backwards that the caller starts (``loss.backward()``) may overlap. Their gradients are
    then one sum, which the last backward to end commits. Call ``begin``, ``commit``, ``take`` and ``roll_back`` on the
    caller's thread and streams, inside the step's fence, and ``commit_some`` on a stage's thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._before: dict[nn.Parameter, Tensor | None] = {}
        self._running = 0
        self._abandoned = 0
        self._failed = False

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set the gradients of ``parameters`` aside. ``roll_back`` also undoes a call that was interrupted."""
        with self._lock:
            self._running += 1
            if self._running > 1:
                return
            self._failed = False
            for parameter in parameters:
                self._before[parameter] = parameter.grad
                parameter.grad = None

    def commit_some(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add the earlier gradients of ``parameters`` to the new ones, which are complete. Cannot be rolled back."""
        for parameter in parameters:
            _add_up(parameter, self._before.pop(parameter, None))

    def commit(self) -> None:
        """The step succeeded: add the new gradients to the earlier ones, in the earlier tensors.

        Raises ``BackwardError`` if an overlapping backward failed: the gradients of the two cannot be separated.
        """
        with self._lock:
            if self._is_last():
                for parameter, before in self._before.items():
                    _add_up(parameter, before)
                self._before.clear()

    def take(self) -> dict[int, Tensor | None]:
        """The step succeeded: the new gradients by ``id`` of their parameter; the earlier ones are restored.

        Empty if another backward is still running, which will take the sum. Raises as ``commit``.
        """
        with self._lock:
            if not self._is_last():
                return {}
            taken = {id(parameter): parameter.grad for parameter in self._before}
            self._restore()
            return taken

    def roll_back(self) -> None:
        """The step failed: restore the gradients that were there before it."""
        with self._lock:
            self._failed = True
            self._running = max(0, self._running - 1)
            if not self._running:
                self._restore()

    def abandon(self) -> None:
        """A step is abandoned while its tasks still run; ``end_abandoned`` must be called when they have ended."""
        with self._lock:
            self._abandoned += 1

    def end_abandoned(self) -> None:
        """The tasks of an abandoned step have ended: roll it back. May be called on any thread."""
        self.roll_back()
        with self._lock:
            self._abandoned -= 1
            self._lock.notify_all()

    def wait_for_abandoned(self) -> None:
        """Wait until the tasks of all abandoned steps have ended. Not for a thread that those tasks may need."""
        with self._lock:
            self._lock.wait_for(lambda: not self._abandoned)

    def _is_last(self) -> bool:
        self._running = max(0, self._running - 1)
        if self._failed:
            if not self._running:
                self._restore()
            raise BackwardError(
                "another backward of this pipeline failed while this one ran, so the gradients of both are dropped; "
                "run this one again"
            )
        return not self._running

    def _restore(self) -> None:
        for parameter, before in self._before.items():
            parameter.grad = before
        self._before.clear()


def _add_up(parameter: nn.Parameter, before: Tensor | None) -> None:
    if before is not None:
        if parameter.grad is not None:
            before += parameter.grad
        parameter.grad = before
