"""What tests of runs share: a sink that keeps all it is told, a stage that fails on demand, and the same end twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from resume_helpers import Loader, Sink, assert_same, batches, make_job
from torch import Generator, Tensor, nn
from torch.nn import functional

from asyncpipe import Share
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.train.job_file import Job
from asyncpipe.train.run_orders import RunOrders
from asyncpipe.train.snapshots.format import read_snapshot
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Batch, Workload

__all__ = [
    "LOADED",
    "MICROBATCHES",
    "Fault",
    "Faulty",
    "Told",
    "assert_same_end",
    "beside_others",
    "clean_state",
    "faulty_workload",
    "job_of",
    "plain",
    "with_nan",
]

MICROBATCHES = 4


class Told(Sink):
    """Keeps losses, phases, lines and snapshots; ``faulty`` learns of steps and attempts."""

    def __init__(self, on_step: Callable[[int], object] = lambda step: None, faulty: Faulty | None = None) -> None:
        super().__init__(on_step)
        self.faulty = faulty
        self.notes: list[tuple[int, str]] = []
        self.snapshots: list[tuple[int, Path]] = []
        self.skipped: list[bool] = []

    def stepped(self, progress: Any) -> None:
        self.skipped.append(progress.skipped)
        if self.faulty is not None:
            self.faulty.next_step()
        super().stepped(progress)

    def noted(self, level: int, text: str) -> None:
        self.notes.append((level, text))
        if self.faulty is not None:
            self.faulty.next_attempt()

    def snapshot(self, step: int, path: Path) -> None:
        self.snapshots.append((step, path))


class _Backward(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(context: Any, x: Tensor, error: BaseException) -> Tensor:
        context.error = error
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        error, context.error = context.error, None  # No ring from it through autograd, where no collector sees it.
        raise error


class Fault(NamedTuple):
    """Where an attempt fails: in the forward or the backward of a micro-batch."""

    microbatch: int
    error: BaseException
    backward: bool = False


class Faulty(nn.Module):
    """Fails as ``plan`` says: for each step, from 0, what becomes of its first attempts. ``Told`` says what is when."""

    def __init__(self, plan: dict[int, list[Fault]] | None = None) -> None:
        super().__init__()
        self.plan = plan or {}
        self.step = self.calls = 0
        self.armed = True

    def next_step(self) -> None:
        self.step += 1
        self.next_attempt()

    def next_attempt(self) -> None:
        self.calls, self.armed = 0, True

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        microbatch, self.calls = self.calls, self.calls + 1
        faults = self.plan.get(self.step, [])
        if not (self.armed and faults and faults[0].microbatch == microbatch):
            return x
        fault, self.armed = faults.pop(0), False  # What still runs of this attempt goes through.
        if not fault.backward:
            raise fault.error
        return _Backward.apply(x, fault.error)


def faulty_workload(faulty: Faulty) -> Workload:
    """A model that counts (batch norm) and draws (dropout) on its first stage, and fails on its second."""
    first = [nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Dropout(0.3)]
    model = nn.Sequential(*first, faulty, nn.Dropout(0.3), nn.Linear(16, 3)).double()
    return Workload(model, nn.functional.mse_loss, batches)


class Recurrent(nn.Module):
    """Draws in a function that takes no generator."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lstm(x.unsqueeze(1))[0]
        return output.squeeze(1)


def plain() -> Workload:
    """One that draws in all ways, and counts."""
    layers = [nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), Recurrent(), nn.Dropout(0.3), nn.Linear(16, 3)]
    return Workload(nn.Sequential(*layers).double(), functional.mse_loss, batches, memoryless=True)


def unruly() -> Workload:
    """Its loader draws where it should not, from the generator that steps draw from."""

    def make(batch_size: int, generator: Generator) -> Iterator[Batch]:
        while True:
            x = torch.randn(batch_size, 3, dtype=torch.float64)
            yield x, x.flip(1)

    return replace(plain(), batches=make)


LOADED: dict[str, Callable[[], Workload]] = {
    "plain": plain,
    "with a state of its own": lambda: replace(plain(), batches=Loader),
    "unruly": unruly,
}
"""The same model with each kind of loader."""


def with_nan(*bad: int) -> Callable[[int, Generator], Iterator[Batch]]:
    """The usual batches, with a value that is no number in those of these numbers, counted from 0."""

    def make(batch_size: int, generator: Generator) -> Iterator[Batch]:
        for number, (x, target) in enumerate(batches(batch_size, generator)):
            if number in bad:
                x[5, 1] = torch.nan
            yield x, target

    return make


def job_of(folder: Path, *, seed: int = 3, devices: int = 2, **training: Any) -> Job:
    """A job for shared devices."""
    pipeline = {"devices": [f"cpu:{index}" for index in range(devices)]}
    return make_job(folder, pipeline=pipeline, training={"seed": seed, **training})


async def beside_others(job: Job, make: Callable[[], Workload], told: Told, folder: Path) -> Any:
    """The job's run, next to two others that draw all the time, on the same devices."""
    async with DevicePool() as pool:
        others = [
            TrainingRun(
                job_of(folder / str(seed), seed=seed, steps=999),
                plain,
                pool=pool,
                orders=RunOrders(Share(str(seed), 2.0)),
            )
            for seed in (7, 8)
        ]
        begun = [asyncio.ensure_future(other.run()) for other in others]
        try:
            return await TrainingRun(job, make, progress=told, pool=pool, orders=RunOrders(Share("mine"))).run()
        finally:
            for other in others:
                other.orders.stop()
            await asyncio.gather(*begun)


def clean_state(snapshot: Path) -> dict[str, Any]:
    """The states in ``snapshot``, but for the time that steps took and what one process has and another has not."""
    states = read_snapshot(snapshot).states
    meter = states["run"]["meter"]
    meter["seconds"] = 0
    for recent in meter["recent"]:
        recent["seconds"] = recent["bubble_ratio"] = 0
    states["run"]["random"] = states["run"]["random"]["cpu"]
    return states


def assert_same_end(one: Path, other: Path) -> None:
    """Two snapshots of the same numbers, to the last bit."""
    assert_same(clean_state(one), clean_state(other))
