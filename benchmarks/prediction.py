"""Predicted against measured steps on several hosts, which workers of this machine stand for.

Each stage sleeps a fixed time in the place of computing, so cores are no limit, and the edges between workers have the
latency and the bandwidth of the links that they stand for (``EdgeShape``). Everything else is real: processes, edges,
schedules, the controller. The prediction knows the sleeps, the sizes of messages and the topology, and nothing of this
machine; so what it lacks is what workers, messages and steps cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import markdown, run_on_loop
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import StageCosts
from asyncpipe.core.predict.report import Report, link_waits, report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.predict.topology import Host, NetworkLink, Topology, TopologyCosts
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.ops.model.stage_factory import StageFactory
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.pool import DevicePool
from tests.support.shaped_edges import EdgeShape, reshape, shape_edges

__all__ = ["CASES", "EmulatedHosts", "PredictionSize", "hosts", "make_stage", "run", "show"]

TOLERANCE = 0.10
LAN, WAN, THIN = NetworkLink(1e-3, 1e8), NetworkLink(0.06, 1e8), NetworkLink(2e-3, 2e6)


@dataclass(frozen=True, slots=True)
class EmulatedHosts:
    """A topology, and the step that is predicted and measured on it."""

    title: str
    topology: Topology
    schedule: str = "1f1b"


def hosts(count: int, devices: int, speeds: Sequence[float] = ()) -> tuple[Host, ...]:
    """``count`` hosts called a, b, … with so many devices each; ``speeds`` are those of all devices in their order."""
    names = tuple(f"cuda:{device}" for device in range(devices))
    speeds = speeds or [1.0] * (count * devices)
    own = [tuple(speeds[k * devices : (k + 1) * devices]) for k in range(count)]
    return tuple(Host("abcd"[k], names, own[k]) for k in range(count))


CASES = (
    EmulatedHosts("one host", Topology(hosts(1, 4))),
    EmulatedHosts("4 hosts, 1 ms, 100 MB/s", Topology(hosts(4, 1), link=LAN)),
    EmulatedHosts("2 hosts of 2, 60 ms apart", Topology(hosts(2, 2), link=WAN)),
    EmulatedHosts("the same, more in flight", Topology(hosts(2, 2), link=WAN), "eager-1f1b"),
    EmulatedHosts("one of three links 2 MB/s", Topology(hosts(4, 1), link=LAN, links={frozenset("bc"): THIN})),
    EmulatedHosts("speeds 1, 1/2, 1, 2/3", Topology(hosts(4, 1, (1.0, 0.5, 1.0, 2 / 3)), link=LAN)),
    EmulatedHosts("2 stages a device, 10 ms", Topology(hosts(2, 2), link=NetworkLink(0.01)), "interleaved"),
)


@dataclass(frozen=True, slots=True)
class PredictionSize:
    """How long tasks take, what they send, and how many there are."""

    forward: float = 0.04
    """Seconds on a device of speed 1, of all its stages together; a backward takes twice that."""
    numbers: int = 40_000
    """Float32 numbers in a message."""
    microbatches: int = 8
    rounds: int = 7
    cases: tuple[EmulatedHosts, ...] = CASES


def run(progress: Progress, *, size: PredictionSize | None = None) -> Figures:
    """Predicted and measured seconds of a step: medians of the rounds, after one that warms up."""
    size = size or PredictionSize()
    rows = run_on_loop(_measured(progress, size))
    within = sum(abs(row["ratio"] - 1) <= TOLERANCE for row in rows)
    return {
        "rows": rows,
        "within": within,
        "tolerance": TOLERANCE,
        "microbatches": size.microbatches,
        "rounds": size.rounds,
        "forward_ms": size.forward * 1e3,
        "bytes": size.numbers * 4,
    }


show = markdown(
    rows="{within} of the predictions are within {tolerance:.0%}: 4 worker processes, {microbatches} micro-batches, "
    "forwards of {forward_ms:g} ms, messages of {bytes} bytes, medians of {rounds} steps; and the share of the step in "
    "which devices wait for links:",
)


class _Rests(torch.autograd.Function):
    """Gives on what it gets, after some seconds, and so does its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward: float, backward: float) -> Tensor:
        began = perf_counter()
        ctx.backward_seconds = backward
        y = x * weight
        sleep(max(0.0, began + forward - perf_counter()))
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        began = perf_counter()
        [gradient] = gradients
        given = gradient.clone(), gradient.sum().reshape(1)
        sleep(max(0.0, began + ctx.backward_seconds - perf_counter()))
        return *given, None, None


class _RestingStage(nn.Module):
    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self._seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Rests.apply(x, self.weight, *self._seconds)  # type: ignore[no-untyped-call]
        return y


def make_stage(stage: int, seconds: Sequence[float]) -> nn.Module:
    """A stage whose forward takes ``seconds[stage]``, and its backward twice that."""
    return _RestingStage(seconds[stage], 2 * seconds[stage])


async def _measured(progress: Progress, size: PredictionSize) -> list[dict[str, Any]]:
    devices = max(len(case.topology.devices) for case in size.cases)
    names = [f"cpu:{device}" for device in range(devices)]
    async with shape_edges(DevicePool(workers="processes")) as pool:
        # Edges get their shapes once the workers are there.
        await _steps(pool, size, size.cases[0], names, rounds=1)
        rows = []
        for case in size.cases:
            progress(case.title)
            await reshape(pool, _shapes(case.topology, names))
            rows.append(await _steps(pool, size, case, names, rounds=size.rounds))
        return rows


def _shapes(topology: Topology, names: Sequence[str]) -> dict[tuple[str, str], EdgeShape]:
    """The edges between workers that stand for the devices of ``topology``, in their order."""
    links = {pair: topology.route(*pair).link for pair in permutations(topology.devices, 2)}
    worker = dict(zip(topology.devices, names, strict=False))
    return {(worker[a], worker[b]): EdgeShape(link.latency, link.bandwidth) for (a, b), link in links.items()}


async def _steps(
    pool: DevicePool, size: PredictionSize, case: EmulatedHosts, names: Sequence[str], *, rounds: int
) -> dict[str, Any]:
    topology, schedule, m = case.topology, find_schedule(case.schedule), size.microbatches
    devices = len(topology.devices)
    shape = Shape(devices * schedule.virtual, m, devices)
    placement, speeds = schedule.placement(shape), [*topology.speeds.values()]
    even = size.forward / schedule.virtual
    costs = StageCosts(
        {TaskKind.FORWARD: [even] * shape.stages, TaskKind.BACKWARD: [2 * even] * shape.stages},
        [4 * size.numbers] * (shape.stages - 1),
    )
    graph = lower(schedule, shape, devices=topology.devices)
    predicted = report(simulate(graph, TopologyCosts(costs, topology)))
    x = torch.ones(m, size.numbers)
    seconds, waits = [], []
    arguments = {"seconds": [even / speeds[device] for device in placement]}
    async with Pipeline(
        StageFactory(make_stage, stages=shape.stages, arguments=arguments),
        [*names[:devices]],
        microbatches=m,
        schedule=schedule,
        checkpoint="never",
        loss_fn=_first,
        optimizer=_sgd,
        pool=pool,
    ) as pipe:
        for _ in range(rounds + 1):
            began = perf_counter()
            result = await pipe.step(x, return_outputs=False)
            seconds.append(perf_counter() - began)
            waits.append(_link_ratio(result.report, result.record.graph))
    measured = median(seconds[1:])
    return {
        "topology": case.title,
        "schedule": case.schedule,
        "predicted_seconds": predicted.seconds,
        "measured_seconds": measured,
        "ratio": predicted.seconds / measured,
        "predicted_waits_share": _link_ratio(predicted, graph),
        "measured_waits_share": median(waits[1:]),
    }


def _link_ratio(found: Report, graph: TaskGraph) -> float:
    """The share of the devices' time in which they wait for links, as a mean."""
    waited = link_waits(found, graph)
    return sum(waited.values()) / len(waited) / found.seconds


def _first(y: Tensor) -> Tensor:
    return y[:, 0].mean()


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)
