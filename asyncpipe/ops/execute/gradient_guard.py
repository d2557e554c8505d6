"""A failed step leaves the gradients of the parameters as they were before it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from asyncpipe.errors import BackwardError
from asyncpipe.ops.autograd.parameter_hooks import call_accumulated_hooks, call_gradient_hooks, hooked
from asyncpipe.ops.execute.gradient_turn import GradientTurn, refuse_inside_task
from asyncpipe.ops.execute.update_undo import UpdateUndo
from asyncpipe.ops.model.ties import accumulated
from asyncpipe.ops.torch_internals import accumulated_hooks, add_to_each

__all__ = ["GradientGuard"]


class GradientGuard:
    """Sets earlier gradients aside while a step makes new ones; then adds them to the new ones, or restores them.

    A pipeline has one. It costs nothing after ``zero_grad()``, and memory for a second set of gradients where gradients
    are accumulated over steps. Its users take turns: ``enter``, ``begin``, then ``commit``, ``pop_gradients`` or
    ``roll_back``, and ``leave``. Backwards of one pass of the autograd engine share a turn and may overlap. Their
    gradients are then one sum, which the last of them gets. Call these on the caller's thread and streams, inside the
    step's fence, and ``commit_some`` on a stage's thread.
    """

    def __init__(self) -> None:
        self._turn = GradientTurn()
        self._lock = threading.Condition()
        self._before: dict[nn.Parameter, Tensor | None] = {}
        self._running = 0
        self._abandoned = 0
        self._repeats = False

    def enter_at_once(self, owner: object, member: object, *, inside_task: bool = False) -> bool:
        """Take the turn, as ``GradientTurn.try_acquire``; false also while an abandoned step still runs."""
        if not self._turn.try_acquire(owner, member, inside_task=inside_task):
            return False
        if self._abandoned:
            self._turn.leave(member)
            return False
        return True

    def enter(self, owner: object, member: object, *, inside_task: bool = False) -> None:
        """Wait for the turn, as ``GradientTurn.acquire``.

        Raises ``BackwardError`` inside another user's turn, on its thread, that has begun and not ended; and inside a
        task, if it would have to wait for what may wait for the task.
        """
        is_inside = self._turn.acquire(owner, member, inside_task=inside_task)
        if inside_task and self._abandoned:
            self._turn.leave(member)
            refuse_inside_task()
        self.wait_for_abandoned()
        if is_inside and self._running:
            self._turn.leave(member)
            raise BackwardError(
                "a step or backward of this pipeline is half-way on this thread, so its gradients and those of another "
                "one cannot be told apart; wait for its end first"
            )

    def leave(self, member: object) -> None:
        """End the turn's part of ``member``; may be called again, on any thread."""
        self._turn.leave(member)

    def begin(self, parameters: Iterable[nn.Parameter], *, repeats: bool = False) -> None:
        """Set the gradients of ``parameters`` aside. ``roll_back`` also undoes a call that was interrupted.

        ``repeats``: for several steps that overlap, each of which updates every parameter that has a gradient. Then
        ``updated`` sets aside what an update has left, for the next step, and ``roll_back`` ends the last one, whether
        it has succeeded or not.
        """
        with self._lock:
            self._running += 1
            if self._running > 1:
                return
            self._repeats = repeats
            for parameter in parameters:
                self._before[parameter] = parameter.grad
                parameter.grad = None

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """As ``commit_some``, in the new gradients, so that it can be rolled back until ``forget``."""
        mine = {parameter: self._before[parameter] for parameter in parameters if parameter in self._before}
        for parameter, before in mine.items():
            self._before[parameter] = None if before is None else before.clone()
        try:
            self.commit_some(mine)
        finally:
            self._before.update(mine)

    def commit_some(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add the earlier gradients of ``parameters`` to the new ones, which are complete, and call their hooks.

        Changes no gradient if a hook raises. Cannot be rolled back otherwise.
        """
        mine = [parameter for parameter in parameters if parameter in self._before]
        with_hooks = [parameter for parameter in hooked(mine) if parameter.grad is not None]
        for parameter in with_hooks:
            call_gradient_hooks(parameter)
        # The others follow when no hook can raise any more: a sum in the earlier tensor cannot be undone.
        first = dict.fromkeys(parameter for parameter in with_hooks if accumulated_hooks(parameter))
        self._add_up_with_hooks(first)
        _add_up((parameter, self._before[parameter]) for parameter in mine if parameter not in first)
        # Not before all are added: if a device fails meanwhile, all are rolled back.
        for parameter in mine:
            del self._before[parameter]

    def earlier(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient that was there before the step."""
        return self._before.get(parameter)

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """The gradients of ``parameters`` have the earlier ones in them. Called on a stage's thread."""
        for parameter in parameters:
            self._before.pop(parameter, None)

    def updated(self, parameters: Iterable[nn.Parameter]) -> None:
        """An optimizer has used the gradients of ``parameters``, which the next of several steps may make anew.

        Called on a stage's thread, after ``commit_some``.
        """
        if self._repeats:
            for parameter in parameters:
                self._before[parameter] = parameter.grad
                parameter.grad = None

    def commit(self) -> None:
        """The step succeeded: add the new gradients to the earlier ones, in the earlier tensors, and call hooks.

        If a hook raises, ``roll_back`` is still to be called.
        """
        self.commit_some(list(self._before))
        with self._lock:
            self._running = 0

    def pop_gradients(self) -> dict[int, Tensor | None]:
        """The step succeeded: the new gradients by ``id`` of their parameter; the earlier ones are restored.

        Empty if another backward of this turn is still running, which will take the sum.
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
            if self._is_last():
                self._restore()

    def end_repeats(self, member: object, undo: UpdateUndo) -> None:
        """No step of a ``begin`` with ``repeats`` is left: restore, then ``undo``, and end the turn.

        May be called again.
        """
        if self._repeats:
            self.roll_back()
            self._repeats = False
        undo.close()
        self.leave(member)

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

    def _add_up_with_hooks(self, parameters: Iterable[nn.Parameter]) -> None:
        undo: list[tuple[Tensor, Tensor]] = []
        try:
            for parameter in parameters:
                if (before := self._before[parameter]) is not None:
                    undo.append((before, before.clone()))
                _add_up([(parameter, before)])
                call_accumulated_hooks(parameter)
        except BaseException:
            for tensor, value in undo:
                tensor.copy_(value)
            raise

    def _is_last(self) -> bool:
        self._running = max(0, self._running - 1)
        return not self._running

    def _restore(self) -> None:
        for parameter, before in self._before.items():
            parameter.grad = before
        self._before.clear()


def _add_up(sums: Iterable[tuple[nn.Parameter, Tensor | None]]) -> None:
    """Add the gradient of each parameter to the one before, in that tensor. On an accelerator by few kernels."""
    alike: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    for parameter, before in sums:
        gradient = parameter.grad
        parameter.grad = gradient if before is None else before
        if before is None or gradient is None:
            continue
        kind = before.device, before.dtype, torch.strided, Tensor
        if kind == (before.device, gradient.dtype, before.layout, type(before)) and gradient.layout is torch.strided:
            totals, gradients = alike.setdefault(kind, ([], []))
            totals.append(before)
            gradients.append(gradient)
        else:
            parameter.grad = accumulated(before, gradient)
    for totals, gradients in alike.values():
        add_to_each(totals, gradients)
