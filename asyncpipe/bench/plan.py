"""How well steps are predicted: the planner's seconds against measured ones, for ten pipelines of one model.

The model's layers are measured while the ten pipelines run: each of their steps comes right after steps for the
profile, so that whatever else the machine does hits both. Layers are of unequal cost, and tasks take two milliseconds
at least.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.rounds import drop_gradients
from asyncpipe.core.predict.layer_profile import Profile
from asyncpipe.core.predict.planner import Plan, plan
from asyncpipe.core.predict.profile_from_journals import StepVariant
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.profiling import Measuring, Sample
from asyncpipe.pipeline.sync import SyncPipeline

__all__ = ["Choice", "Size", "run", "show"]

DEVICES = ("cpu:0", "cpu:1")
TOLERANCE = 0.10


class Choice(NamedTuple):
    """One pipeline to predict and to measure."""

    schedule: str
    balance: tuple[int, ...]
    microbatches: int
    checkpoint: str = "never"


CHOICES = (
    Choice("gpipe", (6, 6), 4),
    Choice("gpipe", (8, 4), 8),
    Choice("1f1b", (7, 5), 4),
    Choice("1f1b", (6, 6), 8),
    Choice("1f1b", (4, 8), 16),
    Choice("1f1b", (7, 5), 8, "always"),
    Choice("interleaved", (3, 4, 2, 3), 8),
    Choice("interleaved", (2, 4, 2, 4), 16),
    Choice("zb-h1", (6, 6), 8),
    Choice("interleaved-zb", (3, 3, 3, 3), 8),
)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is computed, and how often."""

    widths: tuple[int, ...] = (512, 1024, 768, 512, 1024, 1280, 512, 768, 1024, 512, 896, 640, 768)
    samples: int = 768
    rounds: int = 7
    choices: tuple[Choice, ...] = CHOICES


def run(progress: Progress, *, size: Size | None = None) -> Figures:
    """Predicted and measured seconds of each choice: medians over rounds, after one that warms up."""
    size = size or Size()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(size.widths)))
    x, target = torch.randn(size.samples, size.widths[0]), torch.randn(size.samples, size.widths[-1])
    numbers = sorted({choice.microbatches for choice in size.choices})
    measured: list[list[float]] = [[] for _ in size.choices]
    with ExitStack() as stack:
        sample = Sample(x, target, nn.functional.mse_loss)
        measuring = stack.enter_context(Measuring(model, DEVICES, sample, numbers))
        pipes = [stack.enter_context(_pipeline(model, choice)) for choice in size.choices]
        for turn in range(size.rounds + 1):
            progress(f"round {turn + 1} of {size.rounds + 1}")
            for choice, pipe, column in zip(size.choices, pipes, measured, strict=True):
                measuring.round(choice.microbatches, variants=_step_variants(choice), keep=turn > 0)
                seconds = _step(pipe, x, target)
                if turn:
                    column.append(seconds)
        profile = measuring.profile()
    rows = [_row(profile, choice, median(column)) for choice, column in zip(size.choices, measured, strict=True)]
    close = sum(abs(row["ratio"] - 1) <= TOLERANCE for row in rows)
    return {"rows": rows, "within": close, "tolerance": TOLERANCE, "rounds": size.rounds, "samples": size.samples}


def show(figures: Figures) -> str:
    """The figures as a table, a line a pipeline."""
    lines = [
        f"{'schedule':<16} {'balance':<12} {'m':>3} {'checkpoint':<12} {'predicted':>10} {'measured':>10} {'ratio':>6}",
    ]
    for row in figures["rows"]:
        balance = "-".join(map(str, row["balance"]))
        lines.append(
            f"{row['schedule']:<16} {balance:<12} {row['microbatches']:>3} {row['checkpoint']:<12} "
            f"{row['predicted_seconds'] * 1e3:>7.1f} ms {row['measured_seconds'] * 1e3:>7.1f} ms {row['ratio']:>6.3f}"
        )
    lines.append(
        f"{figures['within']} of {len(figures['rows'])} within {figures['tolerance']:.0%} "
        f"(2 CPU devices, {figures['samples']} samples, medians of {figures['rounds']} rounds)"
    )
    return "\n".join(lines)


def _pipeline(model: nn.Module, choice: Choice) -> SyncPipeline:
    """The choice, as a pipeline on a copy of the model."""
    return Pipeline(
        deepcopy(model),
        DEVICES,
        microbatches=choice.microbatches,
        balance=choice.balance,
        schedule=choice.schedule,
        checkpoint=choice.checkpoint,
        loss_fn=nn.functional.mse_loss,
    ).sync()


def _step_variants(choice: Choice) -> list[StepVariant]:
    """The variants of steps that tell what the tasks of a choice take."""
    recomputed = [StepVariant.RECOMPUTED] if choice.checkpoint != "never" else []
    return [StepVariant.KEPT, *recomputed, *([StepVariant.SPLIT] if "zb" in choice.schedule else [])]


def _step(pipe: SyncPipeline, x: Tensor, target: Tensor) -> float:
    begun = time.perf_counter()
    pipe.step(x, target, return_outputs=False)
    seconds = time.perf_counter() - begun
    drop_gradients(pipe.module)
    return seconds


def _predicted(profile: Profile, choice: Choice) -> Plan:
    return plan(
        profile,
        len(DEVICES),
        schedules=[choice.schedule],
        microbatches=[choice.microbatches],
        checkpoints=[choice.checkpoint],
        balances=lambda *_: [choice.balance],
    )[0]


def _row(profile: Profile, choice: Choice, seconds: float) -> Figures:
    predicted = _predicted(profile, choice)
    return {
        **choice._asdict(),
        "predicted_seconds": predicted.seconds,
        "measured_seconds": seconds,
        "ratio": predicted.seconds / seconds,
        "bubble": predicted.bubble,
    }
