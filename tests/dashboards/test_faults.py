"""Artificial faults: each shows up as idle time under its own reason, and trips its own alert and no other.

Five jobs train at the same time, each with a loop in a thread of its own, on emulated devices that sleep, so that
two cores are enough for fifteen of them. One server shows them all; a real Prometheus, where there is one, watches::

    healthy ────────────┐
    slow-stage ─────────┼──▶ MergedCollector ──▶ /metrics ──▶ Prometheus ──▶ alerts
    slow-copy ──────────┤
    blocked-loop ───────┤
    sharing ────────────┘    beside another job of three times its weight, which nobody watches
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus import Prometheus, poll, running
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from torch import nn

from asyncpipe import Costs, DevicePool, Pipeline, Share
from asyncpipe.core.graph.task import Task
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.idle_reasons import IdleReason
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.observe.metrics import MergedCollector, PipelineCollector, serve_metrics
from asyncpipe.testing import EmulatedExecutor
from dashboards.rules import ALERTS, rules_yaml

STAGES, MICROBATCHES = 3, 4
DEVICES = [f"cpu:{stage}" for stage in range(STAGES)]
EVEN = Costs(forward=0.02, backward=0.04)
ENOUGH = 4
"""Steps after which shares of the step time say what a job is like."""
WINDOW, HOLD = "5s", 0.005
JOB_ALERTS = {alert.name for alert in ALERTS} - {"AsyncpipeMemoryNearLimit"}
"""That tell about a job, and not about this machine."""


def slow_stage(task: Task) -> float:
    """Stage 1 takes three times as long as the others."""
    return EVEN(task) * (3 if task.stage == 1 and task.kind is not TaskKind.COPY else 1)


@dataclass(frozen=True)
class Fault:
    """How a job is made to suffer, the reason that its idle time must have, and what must fire."""

    cost: Callable[[Task], float] = EVEN
    blocked: float = 0.0
    """Seconds for which something blocks the loop, again and again."""
    shares: bool = False
    """Whether another job, of a larger weight, uses the same devices."""
    alerts: frozenset[tuple[str, str]] = frozenset()


FAULTS = {
    "healthy": Fault(),
    "slow-stage": Fault(slow_stage, alerts=frozenset({("AsyncpipeUnbalancedStages", "")})),
    "slow-copy": Fault(replace(EVEN, copy=0.08), alerts=frozenset({("AsyncpipeStarvedStage", "copy")})),
    "blocked-loop": Fault(
        blocked=0.2, alerts=frozenset({("AsyncpipeLoopLag", "lag"), ("AsyncpipeLoopLag", "dispatch")})
    ),
    "sharing": Fault(shares=True),
}


@dataclass
class Shares:
    """What the exposition says of a job, in shares of the devices' step time."""

    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By device."""
    idle: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    """By (device, reason)."""
    seconds: float = 0.0
    """Of all steps together."""
    steps: float = 0.0

    def mean(self, reason: str) -> float:
        """The mean over devices of a reason."""
        return sum(self.idle[device, reason] for device in self.busy) / len(self.busy)


def shares(registry: Collector | CollectorRegistry, job: str) -> Shares:
    """The shares of ``job``, read as a scraper would."""
    found = Shares()
    samples = [
        sample
        for family in text_string_to_metric_families(generate_latest(registry).decode())  # type: ignore[arg-type]
        for sample in family.samples
        if sample.labels.get("job") == job
    ]
    for sample in samples:
        match sample.name:
            case "asyncpipe_stage_busy_seconds_total":
                found.busy[sample.labels["device"]] += sample.value
            case "asyncpipe_stage_idle_seconds_total":
                found.idle[sample.labels["device"], sample.labels["reason"]] += sample.value
            case "asyncpipe_step_duration_seconds_sum":
                found.seconds = sample.value
            case "asyncpipe_step_duration_seconds_count":
                found.steps = sample.value
    for table in (found.busy, found.idle):
        for key in table:
            table[key] /= found.seconds
    return found


def pipeline(observers: list[Any], **options: Any) -> Pipeline:
    """A small model, a layer a stage."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(STAGES)))
    options = {"schedule": "1f1b", "checkpoint": "never", "loss_fn": nn.functional.mse_loss} | options
    return Pipeline(model, DEVICES, microbatches=MICROBATCHES, balance=[1] * STAGES, observers=observers, **options)


class TrainingJob(threading.Thread):
    """Trains until it is told to stop; an observer of itself."""

    def __init__(self, name: str, fault: Fault) -> None:
        super().__init__(name=name)
        self.collector = PipelineCollector(name)
        self._fault = fault
        self._steps = threading.Semaphore(0)
        self._stopping = threading.Event()

    def run(self) -> None:
        asyncio.run(self._train())

    def stop(self) -> None:
        """Let it end after the step under way, and wait for that."""
        self._stopping.set()
        self.join()

    def wait_for_steps(self, count: int) -> None:
        """Return when ``count`` more steps are done; asked once for a job."""
        assert all(self._steps.acquire(timeout=30) for _ in range(count))

    def step_completed(self, record: StepRecord) -> None:
        self._steps.release()

    async def _train(self) -> None:
        x = torch.zeros(MICROBATCHES, 8)
        cost = self._fault.cost
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(DevicePool(executors=lambda name: EmulatedExecutor(name, cost)))
            pipe = await stack.enter_async_context(pipeline([self.collector, self], pool=pool, share=self._share()))
            besides = [pool.run(self._block())]
            if self._fault.shares:
                other = pipeline([], pool=pool, share=Share("other", weight=3.0))
                besides.append(self._step(await stack.enter_async_context(other), x))
            beside = [asyncio.create_task(each) for each in besides]
            await self._step(pipe, x)
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)

    def _share(self) -> Share:
        return Share("job") if self._fault.shares else Share()

    async def _step(self, pipe: Pipeline, x: torch.Tensor) -> None:
        while not self._stopping.is_set():
            await pipe.step(x, x)

    async def _block(self) -> None:
        """What bad code on the pool's loop does, an observer or a policy: no ``await`` while it works."""
        while self._fault.blocked:
            time.sleep(self._fault.blocked)  # noqa: ASYNC251 - the fault itself
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def jobs() -> Iterator[dict[str, TrainingJob]]:
    """All jobs, running."""
    started = {name: TrainingJob(name, fault) for name, fault in FAULTS.items()}
    with ExitStack() as stack:
        for job in started.values():
            job.start()
            stack.callback(job.stop)
        yield started


@pytest.fixture(scope="module")
def registry(jobs: dict[str, TrainingJob]) -> CollectorRegistry:
    """What shows all jobs, after a few steps of each."""
    for job in jobs.values():
        job.wait_for_steps(ENOUGH)
    registry = CollectorRegistry()
    registry.register(MergedCollector(job.collector for job in jobs.values()))
    return registry


@pytest.fixture(scope="module")
def watching(
    prometheus_program: str, registry: CollectorRegistry, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the jobs, with rules that are fast."""
    folder: Path = tmp_path_factory.mktemp("prometheus")
    with (
        serve_metrics(registry, 0) as server,
        running(prometheus_program, folder, [f"127.0.0.1:{server.port}"], rules_yaml(WINDOW, HOLD)) as prometheus,
    ):
        yield prometheus


# What adds up


async def test_busy_and_idle_seconds_add_up_to_devices_times_the_step_time() -> None:
    registry = CollectorRegistry()
    collector = PipelineCollector("real")
    registry.register(collector)
    x = torch.randn(256, 8)
    took = 0.0
    async with pipeline([collector]) as pipe:
        for _ in range(20):
            before = time.perf_counter()
            await pipe.step(x, x)
            took += time.perf_counter() - before
    found = shares(registry, "real")
    assert found.steps == 20
    assert found.seconds <= took
    for device in DEVICES:
        reasons = [share for (name, _), share in found.idle.items() if name == device]
        assert len(reasons) == len(IdleReason)
        assert found.busy[device] + sum(reasons) == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("job", FAULTS)
def test_they_add_up_whatever_is_slow(registry: CollectorRegistry, job: str) -> None:
    found = shares(registry, job)
    assert found.steps >= ENOUGH
    assert sum(found.busy.values()) + sum(found.idle.values()) == pytest.approx(STAGES, rel=0.01)


# Reasons


def test_a_healthy_pipeline_waits_for_data_and_drains(registry: CollectorRegistry) -> None:
    found = shares(registry, "healthy")
    assert found.mean("dependency") + found.mean("drain") == pytest.approx(1 / 3, abs=0.08)
    assert found.mean("copy") < 0.1
    assert max(found.busy.values()) < 1.2 * min(found.busy.values())


def test_others_wait_for_the_data_of_a_slow_stage(registry: CollectorRegistry) -> None:
    found, healthy = shares(registry, "slow-stage"), shares(registry, "healthy")
    assert found.busy["cpu:1"] > 2.5 * max(found.busy["cpu:0"], found.busy["cpu:2"])
    for device in ("cpu:0", "cpu:2"):
        assert found.idle[device, "dependency"] > healthy.idle[device, "dependency"] + 0.15
        assert max(found.idle[device, reason] for reason in ("copy", "dispatch")) < 0.1


def test_devices_wait_for_slow_copies(registry: CollectorRegistry) -> None:
    found = shares(registry, "slow-copy")
    assert found.mean("copy") > 0.2
    assert all(found.idle[device, "copy"] > 0.1 for device in DEVICES)
    assert found.mean("dispatch") < 0.1


def test_tasks_that_a_blocked_loop_does_not_hand_out_wait_for_dispatch(registry: CollectorRegistry) -> None:
    found = shares(registry, "blocked-loop")
    assert found.mean("dispatch") > 0.2
    assert found.mean("copy") < 0.05


@pytest.mark.promise(
    "Reported, not silent", "Time in which another job had the device is not counted as a delay of the scheduler."
)
def test_a_job_that_shares_its_devices_waits_for_the_other_one_and_not_for_dispatch(
    registry: CollectorRegistry,
) -> None:
    found = shares(registry, "sharing")
    assert found.mean("shared") > 0.2
    assert found.mean("dispatch") < 0.1


# Alerts


@pytest.mark.long
def test_each_fault_trips_its_alert_and_a_healthy_run_none(watching: Prometheus) -> None:
    def of_jobs() -> set[tuple[str, str, str]]:
        return {alert for alert in watching.firing() if alert[1] in JOB_ALERTS}

    wanted = {(job, *alert) for job, fault in FAULTS.items() for alert in fault.alerts}
    assert poll(lambda: of_jobs() >= wanted, 25), (wanted - of_jobs(), watching.rules())
    assert of_jobs() == wanted


@pytest.mark.long
def test_alerts_say_where(watching: Prometheus) -> None:
    def says(job: str, alert: str) -> str:
        found = watching.get("alerts")["alerts"]
        mine = [a for a in found if a["labels"].get("job") == job and a["labels"]["alertname"] == alert]
        return " ".join(a["annotations"]["description"] for a in mine)

    assert poll(lambda: says("slow-stage", "AsyncpipeUnbalancedStages"), 25)
    assert "The busiest device, cpu:1, computes 1." in says("slow-stage", "AsyncpipeUnbalancedStages")
    assert poll(lambda: says("slow-copy", "AsyncpipeStarvedStage"), 25)
    assert "cpu:1 waits (copy) for" in says("slow-copy", "AsyncpipeStarvedStage")
    assert "mostly at stage 1." in says("slow-copy", "AsyncpipeStarvedStage")
