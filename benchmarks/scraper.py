"""Steps in turns with and without metrics, which are served and scraped over HTTP as in production.

Turns alternate. Each turn with metrics is compared with the adjacent one without.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import Event
from typing import NamedTuple
from urllib.request import urlopen

from prometheus_client import CollectorRegistry

from asyncpipe.bench import Progress
from asyncpipe.bench.harness import rounds
from asyncpipe.observe.metrics import PipelineCollector, serve_metrics
from benchmarks.turns import alternating

__all__ = ["StepTime", "TurnSize", "turns_with_metrics"]

Step = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class TurnSize:
    """How long is measured."""

    seconds: float = 1.0
    """Of each turn: short, so that both kinds of turns see the same load from other processes."""
    rounds: int = 100
    """Turns with metrics, and the same number without."""
    period: float = 1.0
    """Seconds between scrapes."""
    warm_up: int = 20
    """Steps of each kind before the first turn."""


class StepTime(NamedTuple):
    """Seconds per step: by the clock, and of this process's CPU time."""

    wall: float
    cpu: float


async def turns_with_metrics(
    collector: PipelineCollector, plain: Step, observed: Step, size: TurnSize, progress: Progress, what: str = "round"
) -> tuple[list[tuple[StepTime, StepTime]], int]:
    """Repeat ``plain`` and ``observed`` in turns; ``collector``, which ``observed`` feeds, is scraped meanwhile.

    Returns the mean steps of each pair of turns, with metrics and without, and how often metrics were scraped.
    """
    steps = {False: plain, True: observed}
    times: dict[bool, list[StepTime]] = {False: [], True: []}
    registry = CollectorRegistry()
    registry.register(collector)
    with serve_metrics(registry, 0) as server:
        scraper = _Scraper(server.port, size.period)
        for step in steps.values():
            for _ in range(size.warm_up):
                await step()
        scraper.scrape()
        for number in rounds(size.rounds, progress, what):
            for scraped in alternating((False, True), number):
                scraping = scraper.scraping() if scraped else nullcontext()
                times[scraped].append(await _repeated(steps[scraped], size.seconds, scraping))
    return list(zip(times[True], times[False], strict=True)), scraper.scrapes


async def _repeated(step: Step, seconds: float, scraping: AbstractContextManager[None]) -> StepTime:
    """Repeat ``step`` for about ``seconds`` inside ``scraping``; returns the means per step."""
    steps, begun, used = 0, time.perf_counter(), time.process_time()
    with scraping:
        while (taken := time.perf_counter() - begun) < seconds or not steps:
            await step()
            steps += 1
    return StepTime(taken / steps, (time.process_time() - used) / steps)


class _Scraper:
    """Fetches the metrics of a server on the loopback address every ``period`` seconds, as Prometheus does."""

    def __init__(self, port: int, period: float) -> None:
        self.scrapes = 0
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._period = period

    @contextmanager
    def scraping(self) -> Iterator[None]:
        """Scrape on a thread during the block, first after half a period.

        A block that is too short for that is scraped once at its end. The error of a failed scrape is raised there.
        """
        before, stop = self.scrapes, Event()

        def scrape() -> None:
            pause = self._period / 2
            while not stop.wait(pause):
                pause = self._period
                self.scrape()

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(scrape)
            try:
                yield
            finally:
                stop.set()
        done.result()
        if self.scrapes == before:
            self.scrape()

    def scrape(self) -> None:
        """Fetch all metrics once."""
        with urlopen(self._url) as answer:  # noqa: S310 - always http
            answer.read()
        self.scrapes += 1
