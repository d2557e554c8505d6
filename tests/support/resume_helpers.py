"""What tests of runs that go on share: a small job, its data and model, and a sink that keeps what it is told."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Generator, Tensor, nn

from asyncpipe.train.job_file import Job
from asyncpipe.train.progress import ProgressSink, StepProgress
from asyncpipe.train.workload import Batch, Workload

__all__ = [
    "STEPS",
    "Loader",
    "Part",
    "Sink",
    "assert_same",
    "batches",
    "disturb",
    "make_chain",
    "make_job",
    "make_workload",
    "names",
]

STEPS = 6


def make_job(folder: Path | None = None, **tables: dict[str, Any]) -> Job:
    """A small job, with ``tables`` in place of these values. It resumes from its snapshots if it has a ``folder``."""
    snapshots = {} if folder is None else {"folder": str(folder), "every": 1, "keep": 9, "resume": True}
    snapshots |= tables.get("snapshots", {})
    training = {"steps": STEPS, "batch_size": 8, "learning_rate": 0.05, "weight_decay": 0.1, "clip": 0.5, "seed": 3}
    return Job.model_validate(
        {
            "name": "linear",
            "job": {"entry": "tests:build"},
            "pipeline": {"devices": ["cpu:0", "cpu:1"], "microbatches": 4, **tables.get("pipeline", {})},
            "training": {**training, **tables.get("training", {})},
            "observe": tables.get("observe", {}),
            "snapshots": snapshots or None,
            "faults": tables.get("faults", {}),
        }
    )


def batches(batch_size: int, generator: Generator) -> Iterator[Batch]:
    while True:
        x = torch.randn(batch_size, 3, generator=generator, dtype=torch.float64)
        yield x, x.flip(1)


class Loader:
    """One that knows its own place, and takes a number from the generator for each iterator, as torch's does."""

    def __init__(self, batch_size: int, generator: Generator) -> None:
        self.batch_size, self.generator, self.place, self.made = batch_size, generator, 0, 0

    def __iter__(self) -> Iterator[Batch]:
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return self._batches()

    def _batches(self) -> Iterator[Batch]:
        while True:
            self.place += 1
            self.made += 1
            x = torch.randn(self.batch_size, 3, generator=self.generator, dtype=torch.float64) + self.place
            yield x, x.flip(1)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def make_workload() -> Workload:
    layers = [nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3)]
    return Workload(nn.Sequential(*layers).double(), nn.functional.mse_loss, batches)


def make_chain(*, tied: bool) -> Callable[[], Workload]:
    def make() -> Workload:
        layers = [nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3)]
        if tied:
            layers[4].weight = layers[2].weight
        return Workload(nn.Sequential(*layers).double(), nn.functional.mse_loss, batches)

    return make


class Part:
    """Anything that has a state."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state


class Sink(ProgressSink):
    """Keeps what it is told; ``on_step`` runs with the number of every step."""

    def __init__(self, on_step: Callable[[int], object] = lambda step: None) -> None:
        self.losses: list[float] = []
        self.phases: list[str] = []
        self._on_step = on_step

    def entered(self, phase: str) -> None:
        self.phases.append(phase)

    def stepped(self, progress: StepProgress) -> None:
        self.losses.append(progress.loss)
        self._on_step(progress.step)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_same(one: Any, other: Any) -> None:
    """To the last bit."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def disturb() -> None:
    """All default generators, as another process would have them."""
    torch.manual_seed(99)
    random.seed(99)
    numpy.random.seed(99)
