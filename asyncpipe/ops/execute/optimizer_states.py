"""The states of the stages' optimizers under the names that their parameters have in the unsplit model.

So they mean the same wherever the model is cut and whoever has the stages. What an optimizer knows besides its
parameters' states, its settings, stays its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.ops.execute.host_optimizer import original, updated_by

__all__ = ["load_optimizer_states", "optimizer_states", "set_learning_rate"]


def optimizer_states(optimizers: Iterable[torch.optim.Optimizer], module: nn.Module) -> dict[str, dict[str, Any]]:
    """By name of a parameter of ``module``, in its order: what its optimizer remembers of it. Nothing is copied."""
    states = {original(parameter): state for optimizer in optimizers for parameter, state in optimizer.state.items()}
    return {name: dict(states[each]) for name, each in module.named_parameters() if each in states}


def load_optimizer_states(
    optimizers: Iterable[torch.optim.Optimizer], module: nn.Module, states: Mapping[str, Mapping[str, Any]]
) -> None:
    """Give each optimizer copies of what ``states`` has of its parameters, and nothing else to remember."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    for optimizer in optimizers:
        # torch's own way, which casts and moves each value as its optimizer needs it.
        own = optimizer.state_dict()
        parameters = updated_by(optimizer)
        numbers = [number for group in own["param_groups"] for number in group["params"]]
        found = {
            number: {key: _copied(value) for key, value in states[names[parameter]].items()}
            for number, parameter in zip(numbers, parameters, strict=True)
            if names.get(parameter) in states
        }
        optimizer.load_state_dict({"state": found, "param_groups": own["param_groups"]})


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
