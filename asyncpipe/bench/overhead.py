"""The cost of the scheduler itself: empty tasks through the whole runtime, and real tasks.

Empty tasks show what the runtime costs at least. Real tasks show what a step costs beyond the work itself:
(step − a device's work alone) / tasks. Time inside tasks is not taken off as the step's own journal has it: there, a
task that the runtime slows down, or that waits for the interpreter's lock, would hide what it costs. What counts is how
long the same stage takes without any library, alone, in one thread; all stages are equal. So bubbles count as well; and
where there are fewer cores than devices, so does the time in which devices wait for a core. The second number leaves
that out: it takes off the work of all devices, by the cores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.cases import Case, mlp, plain_step
from asyncpipe.bench.contestants import pipelined
from asyncpipe.bench.harness import markdown, medians, one_intra_op_thread, rounds, run_on_loop, seconds_of
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import Task
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.runtime.driver import Driver
from asyncpipe.runtime.executor import TaskFunction
from asyncpipe.runtime.step_driver import Tenant
from asyncpipe.runtime.thread_executor import ThreadExecutor

__all__ = ["OverheadSize", "run", "show"]

MICROBATCHES = 32
"""Of empty steps."""
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""That this process may use."""


def _stages(devices: int) -> Case:
    about = "stages of 4 × Linear(256)+ReLU, one on each device, m=16, 32 rows each"
    return Case(about, devices, 16, (32, 256), partial(mlp, 256, 4))


@dataclass(frozen=True, slots=True)
class OverheadSize:
    """The steps, and how often they are measured."""

    devices: tuple[int, ...] = (2, 4, 8, 16)
    warm_up: int = 5
    steps: int = 20
    """Of empty tasks, on each number of devices."""
    rounds: int = 15
    """Of real tasks."""
    case: Callable[[int], Case] = _stages
    """By the number of devices; all stages are equal."""


def run(progress: Progress, *, size: OverheadSize | None = None) -> Figures:
    """µs per task by number of devices: medians."""
    size = size or OverheadSize()
    return {
        "steps": size.steps,
        "rounds": size.rounds,
        "cores": CORES,
        "about": size.case(1).about,
        "empty": [run_on_loop(_empty_tasks(devices, size, progress)) for devices in size.devices],
        "real": [_real_tasks(devices, size, progress) for devices in size.devices],
    }


show = markdown(
    empty=f"Empty tasks, 1f1b, {MICROBATCHES} micro-batches, medians of {{steps}} steps:",
    real="Real tasks, {about}, no recomputation, medians of {rounds} rounds; µs a task: (step − a device's work alone) "
    "/ tasks; by the cores: the work of all devices / {cores} cores is taken off, if that is longer:",
)


async def _empty_tasks(devices: int, size: OverheadSize, progress: Progress) -> Figures:
    names, shape = [f"cpu:{k}" for k in range(devices)], Shape(devices, MICROBATCHES, devices)
    graph = lower(find_schedule("1f1b"), shape, devices=names, checkpoint=CheckpointMode.EXCEPT_LAST)
    tenant = Tenant()
    driver = Driver({name: ThreadExecutor(name) for name in graph.devices})
    driver.open()
    seconds = []
    progress(f"{size.steps} steps of empty tasks on {devices} devices")
    for _ in range(size.warm_up + size.steps):
        start = time.perf_counter()
        execution = await driver.run(graph, _bind_nothing, tenant=tenant)
        await execution.completed()
        seconds.append(time.perf_counter() - start)
    driver.close()
    driver.join()
    us = median(seconds[size.warm_up :]) / len(graph.tasks) * 1e6
    return {"devices": devices, "tasks": len(graph.tasks), "us_a_task": us}


def _bind_nothing(task: Task) -> TaskFunction:
    return _nothing


def _nothing() -> None:
    return None


def _real_tasks(devices: int, size: OverheadSize, progress: Progress) -> Figures:
    """Medians over rounds, in each of which the step and the work of one device alone take turns."""
    case, rows = size.case(devices), []
    x, target = case.batch()
    alone = partial(plain_step, [case.make_stage()], x.requires_grad_(), target, case.microbatches)
    with one_intra_op_thread(), pipelined(case) as pipe:
        for _ in rounds(size.warm_up + size.rounds, progress, f"real tasks on {devices} devices, round"):
            step, own = pipe.seconds(), seconds_of(alone)
            pipe.clear()
            tasks = len(pipe.results[-1].report.tasks)
            us, by_cores = 1e6 / tasks, own * max(1.0, devices / CORES)
            costs = {"us_a_task": (step - own) * us, "us_a_task_by_the_cores": (step - by_cores) * us}
            rows.append({"step_seconds": step, "device_alone_seconds": own, **costs})
    return {"devices": devices, "tasks": tasks, **medians(rows[size.warm_up :])}
