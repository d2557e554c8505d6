"""The job that is struck: its steps on threads, undisturbed, and its steps in workers, from snapshot to snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe import DevicePool, Pipeline
from tests.campaigns.crashes.strikes import Armed, Strike

__all__ = ["DEVICES", "Job", "Snapshot", "make_model", "take"]

DEVICES = ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
MICROBATCHES = 4


@dataclass(frozen=True)
class Snapshot:
    """A job between two steps."""

    steps: int
    """That are done."""
    state: dict[str, Tensor]
    optimizers: dict[str, Any]

    def check(self, other: Snapshot) -> None:
        """Raise ``AssertionError`` unless ``other`` has the same bits."""
        assert self.steps == other.steps
        _check_equal(self.state, other.state, "the model")
        _check_equal(self.optimizers, other.optimizers, "the optimizers")


class _Head(nn.Module):
    """The first layer's weight once more."""

    def __init__(self, first: nn.Linear) -> None:
        super().__init__()
        self.weight = first.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def make_model(devices: int, strike: Strike | None = None) -> nn.Sequential:
    """A stage for each device, with dropout, batch statistics, and a parameter that the first and the last share."""
    torch.manual_seed(11)
    first = nn.Linear(6, 6)
    stages: list[nn.Module] = [nn.Sequential(Armed(strike), first, nn.Tanh())]
    for _ in range(devices - 2):
        stages.append(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.BatchNorm1d(6)))
    stages.append(nn.Sequential(nn.Linear(6, 6), _Head(first)))
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
        found.check(self._right[found.steps])


def take(pipe: Pipeline, steps: int) -> Snapshot:
    """The snapshot behind ``steps`` steps."""
    state = {name: value.clone() for name, value in pipe.state_dict().items()}
    return Snapshot(steps, state, _copied(pipe.optimizer_states()))


def restore(pipe: Pipeline, snapshot: Snapshot) -> None:
    """Go on from ``snapshot``."""
    pipe.load_state_dict(dict(snapshot.state))
    pipe.load_optimizer_states(snapshot.optimizers)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _check_equal(one: Any, other: Any, where: str) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other), f"{where}: other bits"
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for name in one:
            _check_equal(one[name], other[name], f"{where}, {name}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for position, pair in enumerate(zip(one, other, strict=True)):
            _check_equal(*pair, f"{where}, {position}")
    else:
        assert one == other, where
