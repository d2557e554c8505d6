"""The cost of metrics: the character model trained with a collector that is scraped every second, and without one.

One pipeline trains in turns, with and without the collector as its observer. Each turn with metrics is compared with
the adjacent one without.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.examples import example_job, load_example
from asyncpipe.bench.harness import StepTime, alternating, rounds, run_on_loop, timed_steps
from asyncpipe.bench.scraper import Scraper, scraper
from asyncpipe.observe.metrics import PipelineCollector
from asyncpipe.pipeline.pipeline import Pipeline

__all__ = ["TrainingSize", "run", "show"]


@dataclass(frozen=True, slots=True)
class TrainingSize:
    """How long is measured. The model and its pipeline are those of the example's job file."""

    seconds: float = 1.0
    """Of each turn: short, so that both kinds of turns see the same load from other processes."""
    rounds: int = 100
    """Turns with metrics, and the same number without."""
    period: float = 1.0
    """Seconds between scrapes."""
    warm_up: int = 20
    """Steps."""
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


def show(figures: Figures) -> str:
    """The figures, a line each."""
    low, _, high = quantiles(figures["ratios"], n=4)
    turns = f"{figures['rounds']} turns of {figures['seconds']:g} s each"
    scraped = f"({figures['scrapes']} scrapes)"
    return "\n".join(
        [
            f"examples/charlm, {figures['tasks']} tasks a step; {turns}",
            f"without metrics            {figures['plain_seconds'] * 1e3:8.2f} ms a step",
            f"with metrics, scraped      {figures['metrics_seconds'] * 1e3:8.2f} ms a step  {scraped}",
            f"with / without             {figures['ratio']:8.4f}  (half of the rounds: {low:.3f} to {high:.3f})",
            f"the same in seconds of CPU {figures['cpu_ratio']:8.4f}",
        ]
    )


async def _run(workload: Any, job: dict[str, Any], size: TrainingSize, progress: Progress) -> Figures:
    collector = PipelineCollector("bench")
    turns: dict[bool, list[StepTime]] = {False: [], True: []}
    async with Pipeline(workload.model, loss_fn=workload.loss_fn, **job["pipeline"]) as pipe:
        trainer = _ExampleTrainer(pipe, workload, job, collector)
        for _ in range(size.warm_up):
            await trainer.step()
        with scraper(collector, size.period) as scrapes:
            for number in rounds(size.rounds, progress):
                for observed in alternating((False, True), number):
                    turns[observed].append(await trainer.turn(size.seconds, scrapes if observed else None))
    pairs = list(zip(turns[True], turns[False], strict=True))
    ratios = [on.wall / off.wall for on, off in pairs]
    return {
        "plain_seconds": median(turn.wall for turn in turns[False]),
        "metrics_seconds": median(turn.wall for turn in turns[True]),
        "ratio": median(ratios),
        "cpu_ratio": median(on.cpu / off.cpu for on, off in pairs),
        "ratios": ratios,
        "scrapes": scrapes.scrapes,
        "tasks": trainer.tasks,
        "rounds": size.rounds,
        "seconds": size.seconds,
    }


class _ExampleTrainer:
    """Trains the example's model on its pipeline."""

    def __init__(self, pipe: Pipeline, workload: Any, job: dict[str, Any], collector: PipelineCollector) -> None:
        self.tasks = 0
        self._pipe = pipe
        self._collector = collector
        self._optimizer = torch.optim.AdamW(pipe.parameters(), lr=job["training"]["learning_rate"])
        self._clip = job["training"]["clip"]
        self._tokens = workload.tokens_per_sample
        generator = torch.Generator().manual_seed(job["training"]["seed"])
        self._batches: Iterator[tuple[Tensor, Tensor]] = workload.batches(job["training"]["batch_size"], generator)

    async def turn(self, seconds: float, scrapes: Scraper | None) -> StepTime:
        """Train for ``seconds``; with ``scrapes``, the collector observes the steps."""
        if scrapes is not None:
            self._pipe.observers.append(self._collector)
        time_of_step = await timed_steps(partial(self.step, observed=scrapes is not None), seconds, scrapes)
        self._pipe.observers.clear()
        return time_of_step

    async def step(self, *, observed: bool = False) -> None:
        """One step with its optimizer; ``observed`` steps are told to the collector."""
        begun = time.perf_counter()
        x, target = next(self._batches)
        result = await self._pipe.step(x, target, return_outputs=False)
        assert result.loss is not None
        nn.utils.clip_grad_norm_(self._pipe.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        await result.completed()
        self.tasks = len(result.report.tasks)
        if observed:
            seconds = time.perf_counter() - begun
            self._collector.training_step(result.loss.item(), len(x), len(x) * self._tokens, seconds)
