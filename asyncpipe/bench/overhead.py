"""What the scheduler itself costs: empty tasks through the whole path, and lowering and simulating large schedules.

Metrics are measured against no metrics in slices that take turns; a slice with metrics is compared with the one beside
it. They are scraped over HTTP meanwhile, so that everything counts that a collector does, wherever it does it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.scrape import Scraper, scraper
from asyncpipe.core.engine.events import Observer
from asyncpipe.core.graph.lower import CheckpointMode, lower
from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.observe.metrics.collector import PipelineCollector
from asyncpipe.runtime.driver import Driver
from asyncpipe.runtime.execution import Tenant
from asyncpipe.runtime.executor import ThreadExecutor, Work
from asyncpipe.runtime.observers import Observers
from asyncpipe.runtime.portal import new_event_loop

__all__ = ["MetricsSize", "run", "show"]

MICROBATCHES = 32
STEPS = 20
WARM_UP = 5
MAIN_DEVICES = 4
DEVICES = (2, MAIN_DEVICES, 8, 16)
GRAPH_STAGES = 64
GRAPH_MICROBATCHES = (128, 256, 512, 1024)
SCHEDULE = "1f1b"


@dataclass(frozen=True, slots=True)
class MetricsSize:
    """How long metrics are measured."""

    seconds: float = 2.0
    """Of each slice."""
    rounds: int = 9
    """Slices with metrics, and as many without."""
    period: float = 1.0
    """Seconds between scrapes."""


def run(progress: Progress, *, size: MetricsSize | None = None) -> Figures:
    """µs per task by number of devices (median step) and what metrics add, and seconds to lower and simulate graphs."""
    tasks = []
    for devices in DEVICES:
        progress(f"{STEPS} steps of empty tasks on {devices} devices")
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            tasks.append(runner.run(_empty_steps(devices)))
    graphs = []
    for microbatches in GRAPH_MICROBATCHES:
        progress(f"lowering and simulating {GRAPH_STAGES} stages × {microbatches} micro-batches")
        graphs.append(_large_graph(microbatches))
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        metrics = runner.run(_metrics_cost(progress, size or MetricsSize()))
    return {
        "metrics_us_per_task": metrics["us_per_task"],
        "metrics": metrics,
        "us_per_task": next(row["us_per_task"] for row in tasks if row["devices"] == MAIN_DEVICES),
        "graph_seconds": graphs[-1]["seconds"],
        "microbatches": MICROBATCHES,
        "schedule": SCHEDULE,
        "devices": tasks,
        "graphs": graphs,
    }


def show(figures: Figures) -> str:
    """Both tables, and what metrics cost between them."""
    metrics = figures["metrics"]
    lines = [
        f"empty tasks, {figures['schedule']}, {figures['microbatches']} micro-batches, median of {STEPS} steps",
        "devices    tasks   µs per task",
        *(f"{row['devices']:7}  {row['tasks']:7}  {row['us_per_task']:12.2f}" for row in figures["devices"]),
        "",
        f"metrics, scraped {metrics['scrapes']} times: {metrics['us_per_task']:.2f} µs per task "
        f"({metrics['tasks']} tasks on {MAIN_DEVICES} devices: {metrics['plain_us_per_task']:.2f} without, "
        f"{metrics['scraped_us_per_task']:.2f} with; median difference of {metrics['rounds']} slices each; "
        f"{metrics['cpu_us_per_task']:.2f} in seconds of CPU)",
        "",
        f"{GRAPH_STAGES} stages",
        "micro-batches    tasks  lowered in  µs per task  simulated in  µs per task",
        *(
            f"{row['microbatches']:13}  {row['tasks']:7}  {row['seconds']:8.3f} s  {row['us_per_task']:11.2f}"
            f"  {row['simulate_seconds']:10.3f} s  {row['simulate_us_per_task']:11.2f}"
            for row in figures["graphs"]
        ),
    ]
    return "\n".join(lines)


async def _empty_steps(devices: int) -> Figures:
    graph = _graph(devices)
    empty = _EmptySteps(graph)
    seconds = [await empty.step() for _ in range(WARM_UP + STEPS)]
    empty.close()
    tasks = len(graph.tasks)
    return {"devices": devices, "tasks": tasks, "us_per_task": median(seconds[WARM_UP:]) / tasks * 1e6}


async def _metrics_cost(progress: Progress, size: MetricsSize) -> Figures:
    """µs per empty task without metrics, with metrics that are scraped, and the median difference."""
    graph = _graph(MAIN_DEVICES)
    collector = PipelineCollector("overhead")
    empty = {False: _EmptySteps(graph), True: _EmptySteps(graph, [collector])}
    slices: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with scraper(collector, size.period) as scrapes:
        for steps in empty.values():
            for _ in range(WARM_UP):
                await steps.step()
        scrapes.scrape()
        for number in range(size.rounds):
            progress(f"empty tasks with and without metrics, {number + 1} of {size.rounds}")
            for observed in (False, True) if number % 2 else (True, False):
                scraped = scrapes if observed else None
                slices[observed].append(await _slice(empty[observed], size.seconds, scraped))
    for steps in empty.values():
        steps.close()
    pairs = list(zip(slices[True], slices[False], strict=True))
    return {
        "us_per_task": median(on - off for (on, _), (off, _) in pairs),
        "cpu_us_per_task": median(on - off for (_, on), (_, off) in pairs),
        "plain_us_per_task": median(off for off, _ in slices[False]),
        "scraped_us_per_task": median(on for on, _ in slices[True]),
        "scrapes": scrapes.scrapes,
        "tasks": len(graph.tasks),
        "rounds": size.rounds,
    }


async def _slice(empty: _EmptySteps, seconds: float, scrapes: Scraper | None) -> tuple[float, float]:
    """µs per task, and µs of CPU, of steps that take about ``seconds`` together while ``scrapes`` scrapes."""
    steps, begun, used = 0, time.perf_counter(), time.process_time()
    with nullcontext() if scrapes is None else scrapes.scraping():
        while (taken := time.perf_counter() - begun) < seconds:
            await empty.step()
            steps += 1
    used = time.process_time() - used
    scale = 1e6 / steps / len(empty.graph.tasks)
    return taken * scale, used * scale


def _graph(devices: int) -> TaskGraph:
    names = [f"cpu:{k}" for k in range(devices)]
    shape = Shape(devices, MICROBATCHES, devices)
    return lower(find_schedule(SCHEDULE), shape, devices=names, checkpoint=CheckpointMode.EXCEPT_LAST)


class _EmptySteps:
    """Steps of a graph whose tasks do nothing."""

    def __init__(self, graph: TaskGraph, observers: Sequence[Observer] = ()) -> None:
        self.graph = graph
        self._tenant = Tenant(observers=Observers(observers))
        self._driver = Driver({name: ThreadExecutor(name) for name in graph.devices})
        self._driver.open()

    async def step(self) -> float:
        """Its seconds."""
        start = time.perf_counter()
        execution = await self._driver.run(self.graph, _bind_nothing, tenant=self._tenant)
        await execution.completed()
        return time.perf_counter() - start

    def close(self) -> None:
        self._driver.close()
        self._driver.join()


def _bind_nothing(task: Task) -> Work:
    return _nothing


def _nothing() -> None:
    return None


def _large_graph(microbatches: int) -> Figures:
    shape = Shape(GRAPH_STAGES, microbatches, GRAPH_STAGES)
    start = time.perf_counter()
    graph = lower(find_schedule(SCHEDULE), shape, checkpoint=CheckpointMode.EXCEPT_LAST)
    lowered = time.perf_counter()
    simulate(graph)
    simulated = time.perf_counter() - lowered
    tasks, seconds = len(graph.tasks), lowered - start
    return {
        "microbatches": microbatches,
        "tasks": tasks,
        "seconds": seconds,
        "us_per_task": seconds / tasks * 1e6,
        "simulate_seconds": simulated,
        "simulate_us_per_task": simulated / tasks * 1e6,
    }
