"""The cost of the scheduler itself: empty tasks through the whole runtime; lowering and simulating large schedules.

Empty tasks show what the runtime costs at least. ``real_tasks.py`` measures what it costs where tasks compute.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from statistics import median

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import run_on_loop, seconds_of, table
from asyncpipe.bench.real_tasks import RealTasksSize, cores, real_tasks
from asyncpipe.core.graph.lower import CheckpointMode, lower
from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.runtime.driver import Driver
from asyncpipe.runtime.executor import TaskFunction
from asyncpipe.runtime.step_driver import Tenant
from asyncpipe.runtime.thread_executor import ThreadExecutor

__all__ = ["OverheadSize", "run", "show"]

MICROBATCHES = 32
MAIN_DEVICES = 4
SCHEDULE = "1f1b"


@dataclass(frozen=True, slots=True)
class OverheadSize:
    """The graphs, and how long they are measured."""

    warm_up: int = 5
    devices: tuple[int, ...] = (2, MAIN_DEVICES, 8, 16)
    steps: int = 20
    """On each number of devices."""
    real: RealTasksSize = field(default_factory=RealTasksSize)
    graph_stages: int = 64
    graph_microbatches: tuple[int, ...] = (128, 256, 512, 1024)


def run(progress: Progress, *, size: OverheadSize | None = None) -> Figures:
    """µs per task by number of devices (median step), and seconds to lower and simulate graphs."""
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
    return {
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
    """A table of each."""
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


def _graph(devices: int) -> TaskGraph:
    names = [f"cpu:{k}" for k in range(devices)]
    shape = Shape(devices, MICROBATCHES, devices)
    return lower(find_schedule(SCHEDULE), shape, devices=names, checkpoint=CheckpointMode.EXCEPT_LAST)


class _EmptySteps:
    """Steps of a graph whose tasks do nothing."""

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self._tenant = Tenant()
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
