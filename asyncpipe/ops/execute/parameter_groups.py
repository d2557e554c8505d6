"""Parameter groups of the stages' optimizers, by the names that parameters have in the unsplit model.

Every stage's optimizer has all groups of the model in one order, some of them empty, so the state of a scheduler fits
each of them, wherever the model is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from asyncpipe.errors import OptionError
from asyncpipe.ops.execute.host_optimizer import original
from asyncpipe.ops.execute.learning_rates import RATIO
from asyncpipe.ops.model.replicas import Twins

__all__ = ["ParameterGroups"]


class ParameterGroups:
    """The groups of all trained parameters of a model, and those of its later rows."""

    def __init__(
        self, settings_of: Callable[[str, nn.Parameter], Mapping[str, Any]], module: nn.Module, twins: Twins
    ) -> None:
        """Calls ``settings_of`` once for each parameter. Raises ``OptionError`` for what is no dict of settings."""
        names = {parameter: name for name, parameter in module.named_parameters()}
        self._settings: list[dict[str, Any]] = []
        self._of: dict[nn.Parameter, tuple[int, str]] = {}
        for parameter, name in names.items():
            if not parameter.requires_grad:
                continue
            settings = settings_of(name, parameter)
            if not isinstance(settings, Mapping) or "params" in settings:
                raise OptionError(
                    f"parameter_groups must return a dict of an optimizer's settings, as {{'weight_decay': 0.0}}, and "
                    f"returned {settings!r} for {name!r}"
                )
            if settings not in self._settings:
                self._settings.append(dict(settings))
            self._of[parameter] = self._settings.index(dict(settings)), name
        for twin, parameter in twins.of(names).items():
            if parameter in self._of:
                self._of[twin] = self._of[parameter]

    def of(self, parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        """``parameters`` of one stage, or their copies on the host, as an optimizer takes them."""
        groups: list[dict[str, Any]] = [{"params": [], "param_names": [], **settings} for settings in self._settings]
        for parameter in parameters:
            number, name = self._of[original(parameter)]
            groups[number]["params"].append(parameter)
            groups[number]["param_names"].append(name)
        return groups

    def keep_ratios(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the groups of ``optimizer``, which are these, keep their learning rates' ratio to its own."""
        for group, settings in zip(optimizer.param_groups, self._settings, strict=False):
            if "lr" in settings:
                group[RATIO] = float(settings["lr"]) / float(optimizer.defaults["lr"])
