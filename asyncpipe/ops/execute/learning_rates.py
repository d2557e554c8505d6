"""Schedules of the learning rate: one for each stage's optimizer, all alike, and stepped behind each update.

The state of one is that of all: every optimizer has the same parameter groups (``parameter_groups.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from asyncpipe.errors import OptionError, StateDictError

__all__ = [
    "RATIO",
    "LearningRates",
    "load_schedule_state",
    "load_schedule_states",
    "make_schedule",
    "schedule_state",
    "schedule_states",
    "set_learning_rate",
]

RATIO = "lr_ratio"
"""In a parameter group with a learning rate of its own: that, by the optimizer's."""
_CHANGED = ("lr", "momentum", "betas")
"""What torch's schedulers change in parameter groups."""


class LearningRates:
    """An ``lr_schedule`` that is a function of the step, as ``LearningRates(lambda step: 1e-3 * 0.9**step)``.

    ``function`` gets the number of updates so far, from 0, and returns the learning rate of the next one. A parameter
    group with an ``lr`` of its own keeps its ratio to the optimizer's.
    """

    def __init__(self, function: Callable[[int], float]) -> None:
        self._function = function

    def __call__(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        """The scheduler of one stage."""
        return _ByStep(optimizer, self._function)


class _ByStep(LRScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, function: Callable[[int], float]) -> None:
        self._function = function
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        rate = self._function(self.last_epoch)
        return [rate * group.get(RATIO, 1.0) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "_function"}


def make_schedule(
    make: Callable[[torch.optim.Optimizer], LRScheduler], optimizer: torch.optim.Optimizer
) -> LRScheduler:
    """What ``make`` makes for ``optimizer``. Raises ``OptionError`` for what is no scheduler that steps alone."""
    wanted = (
        "lr_schedule must be a function from an optimizer to a torch scheduler, as functools.partial("
        "torch.optim.lr_scheduler.StepLR, step_size=10), or LearningRates(function of the step)"
    )
    try:
        schedule: object = make(optimizer)
    except Exception as error:
        raise OptionError(f"{wanted}; it raised {type(error).__name__}: {error}") from error
    if not isinstance(schedule, LRScheduler):
        raise OptionError(f"{wanted}; it returned {type(schedule).__name__}")
    if isinstance(schedule, ReduceLROnPlateau):
        raise OptionError(
            "lr_schedule: ReduceLROnPlateau needs a figure that no stage has; leave lr_schedule out and give "
            "step(learning_rate=)"
        )
    return schedule


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups; those that have one of their own keep its ratio."""
    for group in optimizer.param_groups:
        _set(group, "lr", rate * group.get(RATIO, 1.0))


def schedule_state(schedule: LRScheduler) -> dict[str, Any]:
    """Where ``schedule`` is, and what it has set in the groups of its optimizer."""
    groups = [
        {key: _plain(group[key]) for key in _CHANGED if key in group} for group in schedule.optimizer.param_groups
    ]
    return {"schedule": deepcopy(schedule.state_dict()), "groups": groups}


def load_schedule_state(schedule: LRScheduler, state: Mapping[str, Any]) -> None:
    """Go on from a state that ``schedule_state`` has returned for a schedule of the same kind and as many groups."""
    groups = schedule.optimizer.param_groups
    if not state.keys() >= {"schedule", "groups"} or len(state["groups"]) != len(groups):
        raise StateDictError(
            f"the state is not that of a schedule over {len(groups)} parameter groups; give what schedule_states() "
            "returned for a pipeline with the same lr_schedule and parameter_groups"
        )
    schedule.load_state_dict(deepcopy(state["schedule"]))
    for group, values in zip(groups, state["groups"], strict=True):
        for key, value in values.items():
            _set(group, key, value)


def schedule_states(schedules: Mapping[int, LRScheduler]) -> dict[str, Any]:
    """The state of any of ``schedules``, which are alike; empty without any."""
    return next(map(schedule_state, schedules.values()), {})


def load_schedule_states(schedules: Mapping[int, LRScheduler], state: Mapping[str, Any]) -> None:
    """Have all ``schedules`` go on from ``state``."""
    for each in schedules.values():
        load_schedule_state(each, state)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = value
