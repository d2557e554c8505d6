"""What the scheduler itself costs: empty tasks through the whole path, and lowering and simulating large schedules."""

from __future__ import annotations

import asyncio
import time
from statistics import median

from asyncpipe.bench import Figures, Progress
from asyncpipe.core.lower import CheckpointMode, lower
from asyncpipe.core.registry import find_schedule
from asyncpipe.core.schedule import Shape
from asyncpipe.core.simulate import simulate
from asyncpipe.core.task import Task
from asyncpipe.runtime.driver import Driver
from asyncpipe.runtime.executor import ThreadExecutor, Work
from asyncpipe.runtime.portal import new_event_loop

__all__ = ["run", "show"]

MICROBATCHES = 32
STEPS = 20
WARM_UP = 5
MAIN_DEVICES = 4
DEVICES = (2, MAIN_DEVICES, 8, 16)
GRAPH_STAGES = 64
GRAPH_MICROBATCHES = (128, 256, 512, 1024)
SCHEDULE = "1f1b"


def run(progress: Progress) -> Figures:
    """µs per task by number of devices (median step), and seconds to lower and simulate by number of tasks."""
    tasks = []
    for devices in DEVICES:
        progress(f"{STEPS} steps of empty tasks on {devices} devices")
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            tasks.append(runner.run(_empty_steps(devices)))
    graphs = []
    for microbatches in GRAPH_MICROBATCHES:
        progress(f"lowering and simulating {GRAPH_STAGES} stages × {microbatches} micro-batches")
        graphs.append(_large_graph(microbatches))
    return {
        "us_per_task": next(row["us_per_task"] for row in tasks if row["devices"] == MAIN_DEVICES),
        "graph_seconds": graphs[-1]["seconds"],
        "microbatches": MICROBATCHES,
        "schedule": SCHEDULE,
        "devices": tasks,
        "graphs": graphs,
    }


def show(figures: Figures) -> str:
    """Both tables."""
    lines = [
        f"empty tasks, {figures['schedule']}, {figures['microbatches']} micro-batches, median of {STEPS} steps",
        "devices    tasks   µs per task",
        *(f"{row['devices']:7}  {row['tasks']:7}  {row['us_per_task']:12.2f}" for row in figures["devices"]),
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
    names = [f"cpu:{k}" for k in range(devices)]
    shape = Shape(devices, MICROBATCHES, devices)
    graph = lower(find_schedule(SCHEDULE), shape, devices=names, checkpoint=CheckpointMode.EXCEPT_LAST)
    driver = Driver({name: ThreadExecutor(name) for name in names})
    driver.open()
    seconds = []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        execution = await driver.run(graph, _bind_nothing)
        await execution.completed()
        seconds.append(time.perf_counter() - start)
    driver.close()
    driver.join()
    tasks = len(graph.tasks)
    return {"devices": devices, "tasks": tasks, "us_per_task": median(seconds[WARM_UP:]) / tasks * 1e6}


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
