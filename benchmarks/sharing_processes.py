"""Jobs that share devices, on threads of one process and in a process each: cost, weights, and a background job.

::

    threads      job a ─┐                     processes   job a ── its pool ─┐
                 job b ─┴─▶ one DevicePool                job b ── its pool ─┴─▶ arbiter

Devices are emulated, so that nothing but scheduling takes time beside tasks; both arms run the same jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.cases import loss_fn
from asyncpipe.bench.harness import markdown, rounds, run_on_loop
from asyncpipe.core.graph.task import Queue, Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.policies.share import Share
from asyncpipe.core.predict.costs import Costs
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.runtime.workers.control_client import ControlClient
from asyncpipe.runtime.workers.group import WorkerGroup
from asyncpipe.runtime.workers.launcher import Invitation
from asyncpipe.runtime.workers.process_launcher import ProcessLauncher
from asyncpipe.service.jobs.isolation.arbitration import ENTRY, take_seat
from asyncpipe.testing import EmulatedExecutor

__all__ = ["ProcessesSize", "run", "serve", "show"]

SIZES = {"tiny": 1e-4, "fine": 1e-3, "usual": 2e-2}
"""Seconds of a forward; a backward takes twice as long."""


@dataclass(frozen=True, slots=True)
class ProcessesSize:
    """How long everything runs."""

    seconds: float = 6.0
    """Of each measurement."""
    rounds: int = 3


class SharingJob(NamedTuple):
    """A job, and how long its tasks take."""

    share: Share
    forward: float
    devices: int = 2
    microbatches: int = 8
    schedule: str = "1f1b"
    order: str = "strict"


class DoneStep(NamedTuple):
    """When a step ran, and its tasks."""

    begin: float
    end: float
    spans: list[tuple[float, float]]
    """Of compute tasks."""


class _Device(EmulatedExecutor):
    """Costs by the number of micro-batches, which tells the jobs of one pool apart."""

    def __init__(self, device: str, forwards: dict[int, float]) -> None:
        super().__init__(device, Costs())
        self._costs = {count: Costs(seconds, 2 * seconds) for count, seconds in forwards.items()}

    def seconds(self, graph: TaskGraph, task: Task) -> float:
        return self._costs[graph.shape.microbatches](task)


class Trainer:
    """One job on a pool, wherever that is."""

    def __init__(self, job: SharingJob, pool: DevicePool) -> None:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(job.devices)))
        self.pipe = Pipeline(
            *(model, [f"cpu:{k}" for k in range(job.devices)]),
            loss_fn=loss_fn,
            pool=pool,
            share=job.share,
            microbatches=job.microbatches,
            schedule=job.schedule,
            order=job.order,  # type: ignore[arg-type]
            checkpoint="never",
        )
        self._x = torch.randn(job.microbatches, 4)
        self._done: list[DoneStep] = []
        self._is_over = False

    async def run(self, seconds: float) -> list[DoneStep]:
        """Steps for so long, or until ``halt``."""
        loop, self._done, self._is_over = asyncio.get_running_loop(), [], False
        until = loop.time() + seconds
        while loop.time() < until and not self._is_over:
            report = (await self.pipe.step(self._x, self._x, return_outputs=False)).report
            origin = report.origin
            spans = [
                (origin + each.start, origin + each.end)
                for each in report.tasks
                if each.task.lane.queue is Queue.COMPUTE
            ]
            self._done.append(DoneStep(origin, origin + report.end, spans))
        return self._done

    def halt(self) -> None:
        """End ``run`` after its step."""
        self._is_over = True


async def serve(control: ControlClient) -> None:
    """The entry of the process of a job."""
    stack, trainers = AsyncExitStack(), []
    pools: list[DevicePool] = []

    async def begin(job: SharingJob) -> None:
        pool = DevicePool(executors=lambda device: _Device(device, {job.microbatches: job.forward}))
        await stack.enter_async_context(pool)
        pool.threads.sit_down()
        pools.append(pool)
        trainers.append(Trainer(job, pool))
        await stack.enter_async_context(trainers[0].pipe)

    def handle(message: Any) -> Any:
        match message:
            case SharingJob():
                return begin(message)
            case Invitation():
                return pools[0].run(take_seat(pools[0].threads, message))
            case float():
                return trainers[0].run(message)
        return trainers[0].halt()

    async with stack:
        await control.serve(handle)


class _Remote:
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def run(self, seconds: float) -> list[DoneStep]:
        return await self._connection.ask(seconds)  # type: ignore[no-any-return]

    def halt(self) -> None:
        self._connection.send("halt")


@asynccontextmanager
async def _opened(arm: str, *jobs: SharingJob) -> AsyncIterator[list[Trainer | _Remote]]:
    async with AsyncExitStack() as stack:
        if arm == "threads":
            forwards = {job.microbatches: job.forward for job in jobs}
            pool = await stack.enter_async_context(DevicePool(executors=lambda device: _Device(device, forwards)))
            trainers = [Trainer(job, pool) for job in jobs]
            for each in trainers:
                await stack.enter_async_context(each.pipe)
            yield [*trainers]
            return
        entry = "benchmarks.sharing_processes:serve"
        group = await stack.enter_async_context(WorkerGroup(ProcessLauncher(), entry))
        processes = await group.start(*(job.share.job for job in jobs))
        (arbiter,) = await group.start("arbiter", entry=ENTRY)
        for process, job in zip(processes, jobs, strict=True):
            await process.ask(job)
            await process.ask(await arbiter.ask(tuple(f"cpu:{k}" for k in range(job.devices))))
        yield [_Remote(each) for each in processes]


def run(progress: Progress, *, size: ProcessesSize | None = None) -> Figures:
    """What a step costs alone, device seconds by weight, and a background's share of idle time, in both arms."""
    return run_on_loop(_measured(size or ProcessesSize(), progress))


show = markdown(
    alone="One job alone, median seconds of a step; *prepared*: in a process, while another job that shares its "
    "devices does nothing:",
    weights="Two jobs of weights 1 and 3:",
    background="A background job beside 1F1B with 4 micro-batches on 4 devices; its share of the idle time, and what "
    "the foreground's step grows by:",
)


async def _measured(size: ProcessesSize, progress: Progress) -> Figures:
    figures: dict[str, list[dict[str, Any]]] = {"alone": [], "weights": [], "background": []}
    for name, forward in SIZES.items():
        progress(name)
        one = SharingJob(Share("one"), forward)
        steps: dict[str, list[float]] = {"threads": [], "process": [], "prepared": []}
        for _ in rounds(size.rounds, progress, f"{name}: alone, round"):
            for arm, seconds in steps.items():
                jobs = [one, replace_share(one, "idle")] if arm == "prepared" else [one]
                async with _opened(arm, *jobs) as (first, *_):
                    await first.run(0.2)
                    seconds.append(median(_lengths(await first.run(size.seconds / 2))))
        found = {arm: median(seconds) for arm, seconds in steps.items()}
        row: dict[str, Any] = {"task": name} | {f"{arm}_seconds": value for arm, value in found.items()}
        costs = {f"{arm}_cost_share": found[arm] / found["threads"] - 1 for arm in ("process", "prepared")}
        figures["alone"].append(row | costs)
        for arm in ("threads", "processes"):
            figures["weights"].append({"task": name, "arm": arm} | await _weights(arm, forward, size))
            figures["background"].append({"task": name, "arm": arm} | await _background(arm, forward, size))
    return {**figures}


def replace_share(job: SharingJob, name: str, **changed: Any) -> SharingJob:
    """``job`` for another one."""
    return job._replace(share=replace(job.share, job=name, **changed))


def _lengths(steps: Sequence[DoneStep]) -> list[float]:
    """From the beginning of each step to that of the next one."""
    return [after.begin - before.begin for before, after in pairwise(steps)]


def _within(steps: Sequence[DoneStep], begin: float, end: float) -> float:
    spans = [span for step in steps for span in step.spans]
    return sum(max(0.0, min(until, end) - max(since, begin)) for since, until in spans)


async def _weights(arm: str, forward: float, size: ProcessesSize) -> dict[str, Any]:
    light = SharingJob(Share("light"), forward)
    heavy = replace_share(light, "heavy", weight=3.0)
    async with _opened(arm, light, heavy) as (a, b):
        await asyncio.gather(a.run(size.seconds / 4), b.run(size.seconds / 4))
        both = await asyncio.gather(a.run(size.seconds), b.run(size.seconds))
    begin, end = max(each[0].begin for each in both), min(each[-1].end for each in both)
    seconds = [_within(each, begin, end) for each in both]
    busy = sum(seconds) / (end - begin) / light.devices
    # That no two tasks had a device at once is what makes them shares of it.
    return {"ratio": seconds[1] / seconds[0], "wanted": 3.0, "busy_share": busy}


async def _background(arm: str, forward: float, size: ProcessesSize) -> dict[str, Any]:
    front = SharingJob(Share("front"), forward, devices=4, microbatches=4)
    back = SharingJob(Share("back", background=True), forward / 4, 4, 64, "gpipe", "hint")
    async with _opened(arm, front, back) as (a, b):
        await asyncio.gather(a.run(0.2), b.run(0.2))
        alone = await a.run(size.seconds / 2)
        repeating = asyncio.ensure_future(b.run(1e6))
        await a.run(0.2)
        beside = await a.run(size.seconds)
        b.halt()
        got = _within(await repeating, begin := beside[0].begin, end := beside[-1].end)
    idle = 4 * (end - begin) - _within(beside, begin, end)
    grown = median(_lengths(beside)) / median(_lengths(alone)) - 1
    return {"background_share": got / idle, "growth_share": grown}
