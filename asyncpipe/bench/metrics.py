"""What metrics cost: the character model trained with a collector that is scraped every second, and without one.

One pipeline trains in turns, now with the collector as its observer and now without, so that whatever else the machine
does hits both. Each turn with metrics is compared with the one without beside it.
"""

from __future__ import annotations

import asyncio
import time
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.example import example_folder, load_example
from asyncpipe.bench.scrape import Scraper, scraper
from asyncpipe.observe.metrics.collector import PipelineCollector
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.runtime.portal import new_event_loop

__all__ = ["Size", "run", "show"]


@dataclass(frozen=True, slots=True)
class Size:
    """How long is measured; the model and its pipeline are those of the example's job file."""

    seconds: float = 1.0
    """Of each turn: short, so that both kinds see the same weather."""
    rounds: int = 100
    """Turns with metrics, and as many without."""
    period: float = 1.0
    """Seconds between scrapes."""
    warm_up: int = 20
    """Steps."""
    text_bytes: int = 2_000_000


def run(progress: Progress, *, size: Size | None = None) -> Figures:
    """Medians of seconds per step with and without metrics, and of the ratio of turns that follow each other.

    Raises ``OptionError`` where the example is not there.
    """
    size = size or Size()
    example = load_example("charlm")
    job = tomllib.loads((example_folder("charlm") / "charlm.toml").read_text(encoding="utf-8"))
    torch.manual_seed(job["training"]["seed"])
    workload = example.build(**job["job"]["parameters"], max_bytes=size.text_bytes)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_run(workload, job, size, progress))


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


async def _run(workload: Any, job: dict[str, Any], size: Size, progress: Progress) -> Figures:
    collector = PipelineCollector("bench")
    turns: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    async with Pipeline(workload.model, loss_fn=workload.loss_fn, **job["pipeline"]) as pipe:
        trainer = _Trainer(pipe, workload, job, collector)
        for _ in range(size.warm_up):
            await trainer.step()
        with scraper(collector, size.period) as scrapes:
            for number in range(size.rounds):
                progress(f"round {number + 1} of {size.rounds}")
                for observed in (False, True) if number % 2 else (True, False):
                    turns[observed].append(await trainer.turn(size.seconds, scrapes if observed else None))
    ratios = [on / off for (on, _), (off, _) in zip(turns[True], turns[False], strict=True)]
    return {
        "plain_seconds": median(seconds for seconds, _ in turns[False]),
        "metrics_seconds": median(seconds for seconds, _ in turns[True]),
        "ratio": median(ratios),
        "cpu_ratio": median(on / off for (_, on), (_, off) in zip(turns[True], turns[False], strict=True)),
        "ratios": ratios,
        "scrapes": scrapes.scrapes,
        "tasks": trainer.tasks,
        "rounds": size.rounds,
        "seconds": size.seconds,
    }


class _Trainer:
    """Trains the example's model on its pipeline, a step or a turn at a time."""

    def __init__(self, pipe: Pipeline, workload: Any, job: dict[str, Any], collector: PipelineCollector) -> None:
        self.tasks = 0
        self._pipe = pipe
        self._collector = collector
        self._optimizer = torch.optim.AdamW(pipe.parameters(), lr=job["training"]["learning_rate"])
        self._clip = job["training"]["clip"]
        self._tokens = workload.tokens_per_sample
        generator = torch.Generator().manual_seed(job["training"]["seed"])
        self._batches: Iterator[tuple[Tensor, Tensor]] = workload.batches(job["training"]["batch_size"], generator)

    async def turn(self, seconds: float, scrapes: Scraper | None) -> tuple[float, float]:
        """Seconds and seconds of CPU per step, of steps that take ``seconds`` together; observed if one ``scrapes``."""
        if scrapes is not None:
            self._pipe.observers.append(self._collector)
        steps, begun, used = 0, time.perf_counter(), time.process_time()
        with nullcontext() if scrapes is None else scrapes.scraping():
            while (taken := time.perf_counter() - begun) < seconds:
                await self.step(observed=scrapes is not None)
                steps += 1
        used = time.process_time() - used
        self._pipe.observers.clear()
        return taken / steps, used / steps

    async def step(self, *, observed: bool = False) -> None:
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
