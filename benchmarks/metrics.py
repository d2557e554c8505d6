"""The cost of metrics: the character model trained with a collector that is scraped every second, and without one.

One pipeline trains in turns, with and without the collector as its observer (``scraper.py``).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import markdown, run_on_loop
from asyncpipe.observe.metrics import PipelineCollector
from asyncpipe.pipeline.pipeline import Pipeline
from benchmarks.examples import example_job, load_example
from benchmarks.scraper import TurnSize, turns_with_metrics

__all__ = ["TrainingSize", "run", "show"]


@dataclass(frozen=True, slots=True)
class TrainingSize(TurnSize):
    """How long is measured. The model and its pipeline are those of the example's job file."""

    text_bytes: int = 2_000_000


def run(progress: Progress, *, size: TrainingSize | None = None) -> Figures:
    """Medians of seconds per step with and without metrics, and of the ratio of adjacent turns.

    Raises ``OptionError`` if the example is not there.
    """
    size = size or TrainingSize()
    example = load_example("charlm")
    job = example_job("charlm")
    torch.manual_seed(job["training"]["seed"])
    workload = example.build(**job["job"]["parameters"], max_bytes=size.text_bytes)
    return run_on_loop(_run(workload, job, size, progress))


show = markdown(
    medians="examples/charlm, {tasks} tasks a step; {rounds} turns of {seconds:g} s each with and without metrics "
    "({scrapes} scrapes); the ratio is with metrics over without, and the quartiles are those of turns:",
)


async def _run(workload: Any, job: dict[str, Any], size: TrainingSize, progress: Progress) -> Figures:
    collector, training = PipelineCollector("bench"), job["training"]
    tasks = 0
    async with Pipeline(workload.model, loss_fn=workload.loss_fn, **job["pipeline"]) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=training["learning_rate"])
        batches = workload.batches(training["batch_size"], torch.Generator().manual_seed(training["seed"]))

        async def step(*, observed: bool) -> None:
            nonlocal tasks
            pipe.observers[:] = [collector] if observed else []
            begun = time.perf_counter()
            x, target = next(batches)
            result = await pipe.step(x, target, return_outputs=False)
            assert result.loss is not None
            nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            await result.completed()
            tasks = len(result.report.tasks)
            if observed:
                seconds, tokens = time.perf_counter() - begun, len(x) * workload.tokens_per_sample
                collector.training_step(result.loss.item(), len(x), tokens, seconds)

        kinds = partial(step, observed=False), partial(step, observed=True)
        pairs, scrapes = await turns_with_metrics(collector, *kinds, size, progress)
    ratios = [on.wall / off.wall for on, off in pairs]
    return {
        "medians": {
            "plain_seconds": median(turn.wall for _, turn in pairs),
            "metrics_seconds": median(turn.wall for turn, _ in pairs),
            "ratio": median(ratios),
            "quartiles": quantiles(ratios, n=4)[::2],
            "cpu_ratio": median(on.cpu / off.cpu for on, off in pairs),
        },
        "ratios": ratios,
        "scrapes": scrapes,
        "tasks": tasks,
        "rounds": size.rounds,
        "seconds": size.seconds,
    }
