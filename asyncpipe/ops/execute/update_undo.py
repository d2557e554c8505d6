"""Updates that can be undone, until it is known that a step has succeeded everywhere.

A stage is updated as soon as its gradients are complete, so a step can fail when some stages are updated already. With
copies of what each update changes, a failed step leaves parameters, their gradients and optimizers as they were::

    step 1    U(1)    U(0) ── kept: its copies are dropped
    step 2    U(1)            fails: U(1) of step 3, then U(1) of step 2 are undone
    step 3    U(1)            was under way behind it

The price is the time and the memory of a copy of the parameters and of the optimizers' states, so it is an option.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from asyncpipe.ops.execute.host_optimizer import updated_by
from asyncpipe.ops.execute.learning_rates import load_schedule_state, schedule_state

__all__ = ["UpdateUndo"]


class _Saved(NamedTuple):
    """What undoes one update."""

    step: object
    restore: Callable[[], None]


class UpdateUndo:
    """The updates of the steps that are under way in this process, in their order. ``save`` is for stages' threads."""

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self._lock = threading.Lock()
        self._saved: list[_Saved] = []
        self._failed: list[object] = []

    def save(
        self,
        step: object,
        optimizer: torch.optim.Optimizer,
        schedule: LRScheduler | None,
        earlier: Mapping[nn.Parameter, Tensor | None],
    ) -> None:
        """``optimizer`` is about to update its stage, in ``step``, and then its ``schedule``; its stream is current.

        ``earlier`` are the gradients that the stage's parameters had before the step; nobody writes to them.
        """
        if self.is_on:
            saved = _Saved(step, _restoring(optimizer, schedule, earlier))
            with self._lock:
                self._saved.append(saved)

    def keep(self, step: object) -> None:
        """``step`` has succeeded everywhere."""
        with self._lock:
            self._saved = [each for each in self._saved if each.step is not step]

    def fail(self, step: object) -> None:
        """``step`` has failed; ``close`` undoes its updates, and those of steps behind it."""
        self._failed.append(step)

    def close(self) -> None:
        """No step is under way: undo what is to be undone, the last update first."""
        with self._lock:
            first = next((n for n, each in enumerate(self._saved) if each.step in self._failed), len(self._saved))
            undone, self._saved, self._failed = self._saved[first:], [], []
        for each in reversed(undone):
            each.restore()


def _restoring(
    optimizer: torch.optim.Optimizer,
    schedule: LRScheduler | None,
    earlier: Mapping[nn.Parameter, Tensor | None],
) -> Callable[[], None]:
    """What gives ``optimizer``, its ``schedule`` and the parameters that it updates the values that they have now.

    Gradients become those of ``earlier``.
    """
    scheduled = None if schedule is None else schedule_state(schedule)
    values = [(parameter, parameter.detach().clone()) for parameter in updated_by(optimizer)]
    states = {
        parameter: {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
        for parameter, state in optimizer.state.items()
    }

    def restore() -> None:
        with torch.no_grad():
            for parameter, value in values:
                parameter.copy_(value)
        for parameter, gradient in earlier.items():
            parameter.grad = gradient
        for updated in list(optimizer.state):
            if updated in states:
                _put(optimizer.state[updated], states[updated])
            else:
                del optimizer.state[updated]
        if schedule is not None and scheduled is not None:
            load_schedule_state(schedule, scheduled)

    return restore


def _put(state: dict[str, Any], before: dict[str, Any]) -> None:
    for key, value in before.items():
        mine = state.get(key)
        if isinstance(mine, Tensor) and isinstance(value, Tensor) and mine.shape == value.shape:
            mine.copy_(value)
        else:
            state[key] = value
