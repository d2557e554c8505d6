"""What every kind of model is cut into: stages that exchange values, and where they are placed.

A stage is a function of what it receives. Values come from earlier stages or from the caller, and go to later
stages or back to the caller, each pair of ends being a *link*::

    caller ──▶ stage 0 ──▶ stage 1 ──▶ stage 2 ──▶ caller
                  └───── a skip ─────────▲

``ops/model/sequential.py`` makes stages of a sequence of layers, ``ops/model/trace/trace.py`` of any module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.ops.model.running_statistics import StatisticsOf

__all__ = ["CALLER", "Stage", "StageModule", "StagedModel"]

CALLER = -1
"""Stands for the caller where a stage's index stands: as the source of a value, and as where one goes."""


class StageModule(nn.Module):
    """One stage's part of a model. Its parameters and buffers are those of the unsplit model, the same objects."""

    overwrites_input = False
    """Whether it may overwrite in place what it receives, which others still read."""

    def forward(self, received: Mapping[int, Any]) -> dict[int, Any]:
        """From the values received, by the stage that they come from, to those sent, by the stage that they go to.

        Values are nested (torch's pytree); tensors in them may require gradients. Called on the stage's thread,
        and again, with the same input, to recompute.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class StagedModel:
    """A model cut into stages that are not placed yet."""

    module: nn.Module
    """The unsplit model: it owns parameters and buffers, and its names are those of the state dict."""
    stages: Sequence[StageModule]
    links: tuple[tuple[int, int], ...]
    """(source, user) for each pair of stages between which values travel; sources come before users."""
    takes: Callable[[Arguments], dict[int, Any]]
    """What each stage receives from the caller, of a micro-batch's arguments; called on the caller's thread.

    Only stages that take something are in it. Tensors are passed on as the objects that they are.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A stage on its logical device."""

    index: int
    module: StageModule
    device: Device
    statistics: StatisticsOf
    """Its running statistics, which a recomputation must not update again."""
