"""All or nothing: what a failed step has added to the gradients does not stay."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from torch import Tensor, nn

from asyncpipe.errors import BackwardError

__all__ = ["GradientGuard"]


class GradientGuard:
    """Sets earlier gradients aside while steps make their own, then adds them up or puts them back.

    One for a pipeline. Costs nothing after ``zero_grad()``; when gradients are accumulated over steps, memory for
    a second set of gradients. Backwards that the caller starts (``loss.backward()``) may overlap; they then make
    one sum, which the last to end commits. ``begin`` and the ends are for the caller's thread and streams, inside
    the step's fence; ``commit_some`` is for a stage's own thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._before: dict[int, tuple[nn.Parameter, Tensor | None]] = {}
        self._running = 0
        self._abandoned = 0
        self._failed = False

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """No parameter has a gradient. What an interrupt cuts short, ``roll_back`` can still undo."""
        with self._lock:
            self._running += 1
            if self._running > 1:
                return
            self._failed = False
            for parameter in parameters:
                self._before[id(parameter)] = parameter, parameter.grad
                parameter.grad = None

    def commit_some(self, parameters: Iterable[nn.Parameter]) -> None:
        """These parameters' gradients are whole: earlier ones plus the new ones. There is no way back for them."""
        for parameter in parameters:
            _, before = self._before.pop(id(parameter), (None, None))
            _add_up(parameter, before)

    def commit(self) -> None:
        """The step went well: earlier gradients plus the new ones, in the earlier tensors.

        Raises ``BackwardError`` if another one failed meanwhile: the two can no longer be told apart.
        """
        with self._lock:
            if self._is_last():
                for parameter, before in self._before.values():
                    _add_up(parameter, before)
                self._before.clear()

    def take(self) -> dict[int, Tensor | None]:
        """The step went well: the new gradients by ``id`` of their parameter; the earlier ones are in place again.

        Empty while another backward goes on: that one takes the sum. Raises as ``commit``.
        """
        with self._lock:
            if not self._is_last():
                return {}
            taken = {id(parameter): parameter.grad for parameter, _ in self._before.values()}
            self._restore()
            return taken

    def roll_back(self) -> None:
        """The step failed: the gradients are what they were before it."""
        with self._lock:
            self._failed = True
            self._running = max(0, self._running - 1)
            if not self._running:
                self._restore()

    def abandon(self) -> None:
        """Note that nobody waits for a running step any more. ``end_abandoned`` is called when its tasks have ended."""
        with self._lock:
            self._abandoned += 1

    def end_abandoned(self) -> None:
        """Roll back a step that was abandoned and has ended; from any thread."""
        self.roll_back()
        with self._lock:
            self._abandoned -= 1
            self._lock.notify_all()

    def wait_for_abandoned(self) -> None:
        """Wait until every abandoned step has ended. Not on a thread that their tasks may need."""
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
        for parameter, before in self._before.values():
            parameter.grad = before
        self._before.clear()


def _add_up(parameter: nn.Parameter, before: Tensor | None) -> None:
    if before is not None:
        if parameter.grad is not None:
            before += parameter.grad
        parameter.grad = before
