"""The job that is struck: its steps on threads, undisturbed, and its steps in workers, from snapshot to snapshot."""

from __future__ import annotations

import copy
from typing import Any

import torch
from resume_helpers import assert_same
from torch import Tensor, nn

from asyncpipe import DevicePool, Pipeline
from tests.campaigns.crashes.strikes import Armed, Strike
from tests.campaigns.models.layers import TiedOut

__all__ = ["DEVICES", "Job", "Snapshot", "make_model", "take"]

DEVICES = ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
MICROBATCHES = 4


Snapshot = tuple[int, dict[str, Tensor], dict[str, Any]]
"""A job between two steps: how many are done, the states of the model and of the optimizers."""


def make_model(devices: int, strike: Strike | None = None) -> nn.Sequential:
    """A stage for each device, with dropout, batch statistics, and a parameter that the first and the last share."""
    torch.manual_seed(11)
    first = nn.Linear(6, 6)
    stages: list[nn.Module] = [nn.Sequential(Armed(strike), first, nn.Tanh())]
    for _ in range(devices - 2):
        stages.append(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.BatchNorm1d(6)))
    stages.append(nn.Sequential(nn.Linear(6, 6), TiedOut(first.weight)))
    return nn.Sequential(*stages).double()


class Job:
    """Steps whose mini-batches and random numbers follow from their numbers."""

    def __init__(self, schedule: str, devices: int, steps: int) -> None:
        self.schedule = schedule
        self.devices = DEVICES[:devices]
        self.options: dict[str, Any] = {
            "microbatches": MICROBATCHES,
            "schedule": schedule,
            "checkpoint": "always",
            "balance": [1] * devices,
            "loss_fn": nn.functional.mse_loss,
            "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        }
        self.steps = steps
        self._right: list[Snapshot] = []

    async def prepare(self) -> None:
        """Run it on threads, as it should be."""
        async with self.pipeline(None, None) as pipe:
            self._right.append(take(pipe, 0))
            for number in range(self.steps):
                await self.step(pipe, number)
                self._right.append(take(pipe, number + 1))

    @property
    def beginning(self) -> Snapshot:
        """Before the first step."""
        return self._right[0]

    @property
    def end(self) -> Snapshot:
        """Behind the last step."""
        return self._right[-1]

    def pipeline(self, pool: DevicePool | None, strike: Strike | None) -> Pipeline:
        """One on threads if there is no pool."""
        return Pipeline(make_model(len(self.devices), strike), list(self.devices), pool=pool, **self.options)

    async def step(self, pipe: Pipeline, number: int) -> None:
        """The step after ``number`` others."""
        torch.manual_seed(1000 + number)
        x, target = torch.randn(2, 3 * MICROBATCHES, 6, dtype=torch.float64)
        await pipe.step(x, target, return_outputs=False)

    def check(self, found: Snapshot) -> None:
        """Raise ``AssertionError`` unless it is bit-equal to the undisturbed run."""
        assert_same(found, self._right[found[0]])


def take(pipe: Pipeline, steps: int) -> Snapshot:
    """The snapshot behind ``steps`` steps."""
    return copy.deepcopy((steps, dict(pipe.state_dict()), pipe.optimizer_states()))


def restore(pipe: Pipeline, snapshot: Snapshot) -> None:
    """Go on from ``snapshot``."""
    _, state, optimizers = snapshot
    pipe.load_state_dict(dict(state))
    pipe.load_optimizer_states(optimizers)
