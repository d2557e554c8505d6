"""The cost of the scheduler itself: empty tasks through the whole runtime; lowering and simulating large schedules.

Empty tasks show what the runtime costs at least. What it costs where tasks compute is in ``real_tasks.py``, by a number
that cannot hide anything; it is shown for both.

The cost of metrics is measured in turns with and without them (``scraper.py``), so that all of a collector's work
counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import run_on_loop, seconds_of, table
from asyncpipe.bench.real_tasks import RealTasksSize, cores, real_tasks
from asyncpipe.bench.scraper import TurnSize, turns_with_metrics
from asyncpipe.core.graph.lower import CheckpointMode, lower
from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.records.step_record import Observer
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.observe.metrics import PipelineCollector
from asyncpipe.runtime.driver import Driver
from asyncpipe.runtime.executor import TaskFunction
from asyncpipe.runtime.observers import Observers
from asyncpipe.runtime.step_driver import Tenant
from asyncpipe.runtime.thread_executor import ThreadExecutor

__all__ = ["OverheadSize", "metrics_cost", "run", "show"]

MICROBATCHES = 32
MAIN_DEVICES = 4
SCHEDULE = "1f1b"


@dataclass(frozen=True, slots=True)
class OverheadSize(TurnSize):
    """The graphs, and how long they are measured."""

    seconds: float = 2.0
    rounds: int = 9
    warm_up: int = 5
    devices: tuple[int, ...] = (2, MAIN_DEVICES, 8, 16)
    steps: int = 20
    """On each number of devices."""
    real: RealTasksSize = field(default_factory=RealTasksSize)
    graph_stages: int = 64
    graph_microbatches: tuple[int, ...] = (128, 256, 512, 1024)


def run(progress: Progress, *, size: OverheadSize | None = None) -> Figures:
    """µs per task by number of devices (median step), what metrics add, and seconds to lower and simulate graphs."""
    size = size or OverheadSize()
    tasks = []
    for devices in size.devices:
        progress(f"{size.steps} steps of empty tasks on {devices} devices")
        tasks.append(run_on_loop(_empty_steps(devices, size)))
    real = [run_on_loop(real_tasks(devices, size.real, progress)) for devices in size.devices]
    graphs = []
    for microbatches in size.graph_microbatches:
        progress(f"lowering and simulating {size.graph_stages} stages × {microbatches} micro-batches")
        graphs.append(_large_graph(size.graph_stages, microbatches))
    metrics = run_on_loop(metrics_cost(progress, size))
    return {
        "metrics_us_per_task": metrics["us_per_task"],
        "metrics": metrics,
        "us_per_task": next(row["us_per_task"] for row in tasks if row["devices"] == MAIN_DEVICES),
        "graph_seconds": graphs[-1]["seconds"],
        "microbatches": MICROBATCHES,
        "schedule": SCHEDULE,
        "steps": size.steps,
        "devices": tasks,
        "real": {**asdict(size.real), "cores": cores(), "devices": real},
        "graph_stages": size.graph_stages,
        "graphs": graphs,
    }


def show(figures: Figures) -> str:
    """Both tables, and the cost of metrics between them."""
    metrics = figures["metrics"]
    lines = [
        f"empty tasks, {figures['schedule']}, {figures['microbatches']} micro-batches, "
        f"median of {figures['steps']} steps",
        *table(
            [
                ["devices", "tasks", "µs per task", "without the busiest device's plain loop"],
                *(
                    [str(row["devices"]), str(row["tasks"]), f"{row['us_per_task']:.2f}", f"{row['beyond_plain']:.2f}"]
                    for row in figures["devices"]
                ),
            ]
        ),
        "",
        *_show_real(figures["real"]),
        "",
        f"metrics, scraped {metrics['scrapes']} times: {metrics['us_per_task']:.2f} µs per task "
        f"({metrics['tasks']} tasks on {MAIN_DEVICES} devices: {metrics['plain_us_per_task']:.2f} without, "
        f"{metrics['scraped_us_per_task']:.2f} with; median difference of {metrics['rounds']} slices each; "
        f"{metrics['cpu_us_per_task']:.2f} in seconds of CPU)",
        "",
        f"{figures['graph_stages']} stages",
        "micro-batches    tasks  lowered in  µs per task  simulated in  µs per task",
        *(
            f"{row['microbatches']:13}  {row['tasks']:7}  {row['seconds']:8.3f} s  {row['us_per_task']:11.2f}"
            f"  {row['simulate_seconds']:10.3f} s  {row['simulate_us_per_task']:11.2f}"
            for row in figures["graphs"]
        ),
    ]
    return "\n".join(lines)


def _show_real(real: Figures) -> list[str]:
    head = "devices", "tasks", "step", "busiest device alone", "µs per task", f"with {real['cores']} cores"
    return [
        f"real tasks: {real['layers']} × Linear({real['width']})+ReLU on each device, {real['microbatches']} "
        f"micro-batches of {real['rows']} rows, no recomputation; median of {real['rounds']} rounds",
        *table(
            [
                head,
                *(
                    (
                        str(row["devices"]),
                        str(row["tasks"]),
                        f"{row['step_seconds'] * 1e3:.1f} ms",
                        f"{row['busiest_seconds'] * 1e3:.1f} ms",
                        f"{row['us_per_task']:.1f}",
                        f"{row['us_per_task_by_cores']:.1f}",
                    )
                    for row in real["devices"]
                ),
            ]
        ),
        "µs per task: (step − busiest device's time in the plain loop) / tasks; "
        "with the cores: the plain loop's time / cores, if that is longer",
    ]


async def _empty_steps(devices: int, size: OverheadSize) -> Figures:
    graph = _graph(devices)
    empty = _EmptySteps(graph)
    seconds = [await empty.step() for _ in range(size.warm_up + size.steps)]
    empty.close()
    tasks, step = len(graph.tasks), median(seconds[size.warm_up :])
    plain = seconds_of(lambda: _plain_loop(tasks // devices))
    return {
        "devices": devices,
        "tasks": tasks,
        "us_per_task": step / tasks * 1e6,
        "beyond_plain": (step - plain) / tasks * 1e6,
    }


async def metrics_cost(progress: Progress, size: OverheadSize) -> Figures:
    """µs per empty task without metrics, with metrics that are scraped, and the median difference."""
    graph = _graph(MAIN_DEVICES)
    collector = PipelineCollector("overhead")
    plain, observed = _EmptySteps(graph), _EmptySteps(graph, [collector])
    what = "empty tasks with and without metrics,"
    pairs, scrapes = await turns_with_metrics(collector, plain.step, observed.step, size, progress, what)
    plain.close()
    observed.close()
    scale = 1e6 / len(graph.tasks)
    return {
        "us_per_task": scale * median(on.wall - off.wall for on, off in pairs),
        "cpu_us_per_task": scale * median(on.cpu - off.cpu for on, off in pairs),
        "plain_us_per_task": scale * median(off.wall for _, off in pairs),
        "scraped_us_per_task": scale * median(on.wall for on, _ in pairs),
        "scrapes": scrapes,
        "tasks": len(graph.tasks),
        "rounds": size.rounds,
    }


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
        """Run one step; returns its seconds."""
        start = time.perf_counter()
        execution = await self._driver.run(self.graph, _bind_nothing, tenant=self._tenant)
        await execution.completed()
        return time.perf_counter() - start

    def close(self) -> None:
        """End the devices' threads."""
        self._driver.close()
        self._driver.join()


def _plain_loop(tasks: int) -> None:
    """A device's empty tasks without any library."""
    for _ in range(tasks):
        _nothing()


def _bind_nothing(task: Task) -> TaskFunction:
    return _nothing


def _nothing() -> None:
    return None


def _large_graph(stages: int, microbatches: int) -> Figures:
    shape = Shape(stages, microbatches, stages)
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
