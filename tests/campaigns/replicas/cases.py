"""What a case is: replicas, stages, a schedule and what a step may have besides."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

__all__ = ["TABLE", "Case", "Head", "draw", "make_model"]

REPLICAS, STAGES = (2, 3, 4), (1, 2, 4)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "backward-first")
"""The last is a rule."""
WAYS = ("plain", "sharded", "bfloat16")
WIDTH = 6


@dataclass(frozen=True)
class Case:
    """One run on threads, and one in workers if the pipeline has the optimizers."""

    seed: int
    replicas: int
    devices: int
    """Of each replica."""
    schedule: str
    way: str
    workers: bool = True
    microbatches: int = 4
    samples: int = 0
    """0: two for each micro-batch, and one less."""
    optimizer: str = "adamw"
    loss: str = "mean"
    norm: str = ""
    dropout: float = 0.0
    tie: bool = False
    checkpoint: str = "except_last"
    updates: tuple[bool, ...] = (True, True)
    ahead: int = 0

    @property
    def is_ordered(self) -> bool:
        """Whether sums have an order. Under a rule gradients are added up as they come."""
        return self.schedule != "backward-first"

    @property
    def size(self) -> int:
        """Of a mini-batch."""
        return self.samples or 2 * self.replicas * self.microbatches - 1


class Head(nn.Module):
    """The first layer's weight once more."""

    def __init__(self, first: nn.Linear) -> None:
        super().__init__()
        self.weight = first.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def make_model(case: Case) -> nn.Sequential:
    """Ten layers with all that the case asks for."""
    torch.manual_seed(case.seed)
    first = nn.Linear(WIDTH, WIDTH)
    norms = {
        "": nn.Identity,
        "batch": lambda: nn.BatchNorm1d(WIDTH),
        "mean": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    }
    layers = [first, norms[case.norm](), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Dropout(case.dropout), nn.Tanh()]
    layers += [nn.Linear(WIDTH, 2 * WIDTH), norms[""](), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)]
    if case.norm:  # Two in a row, of a stage and of the next one.
        layers.insert(4, norms[case.norm]())
    return nn.Sequential(*layers, Head(first) if case.tie else nn.Linear(WIDTH, WIDTH)).double()


TABLE = [
    Case(7, replicas, devices, schedule, way)
    for replicas, devices, schedule, way in product(REPLICAS, STAGES, SCHEDULES, WAYS)
]


def draw(seed: int) -> Case:
    """The case of ``seed``."""
    chance = random.Random(seed)
    replicas, devices = chance.choice(REPLICAS), chance.choice(STAGES)
    schedule = chance.choice(SCHEDULES)
    microbatches = 4 if schedule in ("interleaved", "zbv") else chance.choice([1, 2, 3, 4, 5])
    most = replicas * microbatches
    optimizer = chance.choice(["adamw", "momentum", "none"])
    norm = chance.choice(["", "", "batch", "mean"]) if schedule != "backward-first" else ""
    ahead = 0 if norm or optimizer == "none" else chance.choice([0, 2])
    updates = [True] * 3 if ahead or optimizer == "none" else [chance.random() < 0.7 for _ in range(3)]
    sizes = [2 * most, 2 * most + 1, 3 * most - 1] if norm else [1, max(1, most - 1), most, 2 * most + 1]
    return Case(
        seed,
        replicas,
        devices,
        schedule,
        "plain" if optimizer == "none" else chance.choice(WAYS),
        workers=optimizer != "none",
        microbatches=microbatches,
        samples=chance.choice(sizes),
        optimizer=optimizer,
        loss=chance.choice(["mean", "sum", "counted"]),
        norm=norm,
        dropout=chance.choice([0.0, 0.3]),
        tie=(devices == 1 and chance.random() < 0.5) or (optimizer == "none" and chance.random() < 0.5),
        checkpoint=chance.choice(["always", "except_last", "never"]),
        updates=tuple(updates),
        ahead=ahead,
    )
