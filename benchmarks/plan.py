"""The accuracy of the planner: predicted against measured seconds of a step, for pipelines of one model.

Ten are one pipeline on both devices, and four two replicas of one device each. Two pipelines are in the right order if
the one with the shorter predicted step has the shorter measured one; pairs whose measured steps are within the
tolerance of each other do not count.

The layers are profiled while the ten pipelines run: each measured step directly follows steps for the profile, so that
other load on the machine affects both. Layers have unequal costs, and tasks take at least two milliseconds.
"""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import markdown, rounds, seconds_of
from asyncpipe.core.predict.layer_profile import Profile
from asyncpipe.core.predict.planner import plan
from asyncpipe.core.predict.profile_from_journals import StepVariant
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.profiling import Measuring, SampleBatch
from asyncpipe.pipeline.sync import SyncPipeline

__all__ = ["PlanSize", "PredictedPipeline", "run", "show", "step_variants"]

DEVICES = ("cpu:0", "cpu:1")
TOLERANCE = 0.10


class PredictedPipeline(NamedTuple):
    """A pipeline whose step is predicted and measured."""

    schedule: str
    balance: tuple[int, ...]
    microbatches: int
    checkpoint: str = "never"
    replicas: int = 1
    shard_optimizer: bool = False


CHOICES = (
    PredictedPipeline("gpipe", (6, 6), 4),
    PredictedPipeline("gpipe", (8, 4), 8),
    PredictedPipeline("1f1b", (7, 5), 4),
    PredictedPipeline("1f1b", (6, 6), 8),
    PredictedPipeline("1f1b", (4, 8), 16),
    PredictedPipeline("1f1b", (7, 5), 8, "always"),
    PredictedPipeline("interleaved", (3, 4, 2, 3), 8),
    PredictedPipeline("interleaved", (2, 4, 2, 4), 16),
    PredictedPipeline("zb-h1", (6, 6), 8),
    PredictedPipeline("interleaved-zb", (3, 3, 3, 3), 8),
    PredictedPipeline("gpipe", (12,), 2, replicas=2),
    PredictedPipeline("1f1b", (12,), 4, replicas=2),
    PredictedPipeline("1f1b", (12,), 4, replicas=2, shard_optimizer=True),
    PredictedPipeline("1f1b", (12,), 8, "always", replicas=2),
)


@dataclass(frozen=True, slots=True)
class PlanSize:
    """The model, the pipelines, and the number of rounds."""

    widths: tuple[int, ...] = (512, 1024, 768, 512, 1024, 1280, 512, 768, 1024, 512, 896, 640, 768)
    samples: int = 768
    rounds: int = 7
    choices: tuple[PredictedPipeline, ...] = CHOICES


def run(progress: Progress, *, size: PlanSize | None = None) -> Figures:
    """Predicted and measured seconds of each pipeline: medians over rounds, after one warm-up round."""
    size = size or PlanSize()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(size.widths)))
    x, target = torch.randn(size.samples, size.widths[0]), torch.randn(size.samples, size.widths[-1])
    numbers = sorted({choice.microbatches * choice.replicas for choice in size.choices})
    measured: list[list[float]] = [[] for _ in size.choices]
    with ExitStack() as stack:
        sample = SampleBatch(x, target, nn.functional.mse_loss, optimizer=_optimizer)
        measuring = stack.enter_context(Measuring(model, DEVICES, sample, numbers))
        pipes = [stack.enter_context(_pipeline(model, choice)) for choice in size.choices]
        for turn in rounds(size.rounds + 1, progress):
            for choice, pipe, column in zip(size.choices, pipes, measured, strict=True):
                pieces = choice.microbatches * choice.replicas
                measuring.round(pieces, variants=step_variants(choice), keep=turn > 0)
                seconds = seconds_of(partial(pipe.step, x, target, return_outputs=False))
                if turn:
                    column.append(seconds)
        profile = measuring.profile()
    rows = [_row(profile, choice, median(column)) for choice, column in zip(size.choices, measured, strict=True)]
    close = sum(abs(row["ratio"] - 1) <= TOLERANCE for row in rows)
    times = sorted((row["measured_seconds"], row["predicted_seconds"]) for row in rows)
    pairs = [(a, b) for (one, a), (other, b) in combinations(times, 2) if other > one * (1 + TOLERANCE)]
    figures = {"rows": rows, "within": close, "tolerance": TOLERANCE, "rounds": size.rounds, "samples": size.samples}
    return figures | {"pairs": len(pairs), "in_order": sum(a < b for a, b in pairs)}


show = markdown(
    rows="2 CPU devices, {samples} samples, medians of {rounds} rounds; {within} of the predictions are within "
    "{tolerance:.0%}; of {pairs} pairs whose measured steps differ by more, {in_order} are in the right order."
)


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-6)


def _pipeline(model: nn.Module, choice: PredictedPipeline) -> SyncPipeline:
    """The chosen pipeline on a copy of the model; its optimizer is in the step."""
    options: dict[str, Any] = choice._asdict()
    pipe = Pipeline(deepcopy(model), DEVICES, loss_fn=nn.functional.mse_loss, optimizer=_optimizer, **options)
    return pipe.sync()


def step_variants(choice: PredictedPipeline) -> list[StepVariant]:
    """The variants of profiled steps that measure the tasks of this pipeline."""
    mode = StepVariant.SELECTIVE if choice.checkpoint == "selective" else StepVariant.RECOMPUTED
    recomputed = [mode] if choice.checkpoint != "never" else []
    return [StepVariant.KEPT, *recomputed, *([StepVariant.SPLIT] if "zb" in choice.schedule else [])]


def _row(profile: Profile, choice: PredictedPipeline, seconds: float) -> Figures:
    options: dict[str, Any] = {"schedules": [choice.schedule], "balances": lambda *_: [choice.balance]}
    options |= {"microbatches": [choice.microbatches * choice.replicas], "checkpoints": [choice.checkpoint]}
    options |= {"replicas": [choice.replicas], "shards": [choice.shard_optimizer]}
    predicted = plan(profile, len(DEVICES), **options)[0].seconds
    return {
        **choice._asdict(),
        "predicted_seconds": predicted,
        "measured_seconds": seconds,
        "ratio": predicted / seconds,
    }
