"""Reductions over replicas in the bubble: what they add to a simulated step, and the picture of a real one.

Simulated are 4 replicas × 8 stages of a GPT with 1.3 billion parameters (24 blocks of width 2,048, a vocabulary of
50,257, sequences of 2,048 tokens), with the costs of a device that does 400 teraflops a second. Each device has a link
of 25 GB/s to those of the other replicas, which these share evenly, and 300 GB/s to those of its own. Four arms::

    alone     no reduction: the step that there is without replicas
    tasks     A(j, k) begins when the gradients of stage j are complete in all replicas
    device    a device reduces all of its stages when it has computed everything, as torch.distributed.pipelining does
    step      all reduce when the step is over, as a caller does that reduces between step() and its optimizer

A reduction is A and G: a reduce-scatter and an all-gather. *Hidden* is the share of what they add to the arm ``step``
that they do not add to another arm. *Within* is the share of their seconds, from a stage's last gradient to its last G,
that lies before the end of the last backward.

The picture is that of a real step of 2 × 4 on threads. The layers there do nothing but wait, so that two cores are
enough for eight devices; what is added up, gathered and updated is real.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import combinations
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import markdown
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import TaskGraph, Wiring
from asyncpipe.core.kinds import COLLECTIVE_KINDS, COMPUTE_KINDS, TaskKind
from asyncpipe.core.predict.balance import even_balance
from asyncpipe.core.predict.costs import StageCosts
from asyncpipe.core.predict.layer_profile import BUCKET_BYTES
from asyncpipe.core.predict.report import Report, report, reports, steady_state
from asyncpipe.core.predict.simulate import simulate, simulate_steps
from asyncpipe.core.predict.topology import Host, NetworkLink, Topology, TopologyCosts
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.observe.pictures.svg import svg_timeline
from asyncpipe.pipeline.pipeline import Pipeline

__all__ = ["run", "show"]

SCHEDULES = ("1f1b", "zb-h1", "interleaved", "gpipe", "zbv")
WIDTH, BLOCKS, VOCABULARY, LENGTH, SEQUENCES = 2048, 24, 50_257, 2048, 4
"""Of the model, and of a micro-batch."""
FLOPS, MEMORY = 400e12, 2e12
"""Floating-point operations a second, and bytes a second of the device's memory."""
LINK, INSIDE = 25e9, 300e9
"""Bytes a second from a device to those of other replicas together, and to each of its own."""


def run(
    progress: Progress,
    *,
    replicas: int = 4,
    devices: int = 8,
    microbatches: int = 16,
    schedules: tuple[str, ...] = SCHEDULES,
    bucket: int = BUCKET_BYTES,
    out: str | None = None,
) -> Figures:
    """A row for each schedule and type of gradients; with ``out`` the picture ``replicas.svg`` in that folder."""
    rows, steady = [], []
    for name in schedules:
        for gradients, size in (("float32", 4), ("bfloat16", 2)):
            progress(f"{name}, gradients in {gradients}")
            arms = _Arms(name, Shape(devices, microbatches, devices), replicas, size, bucket)
            rows.append({"schedule": name, "gradients": gradients, **arms.row()})
            if size == 4:
                steady.append({"schedule": name, **arms.overlapping()})
    if out is not None:
        progress("a real step of 2 × 4")
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "replicas.svg").write_text(_picture(), encoding="utf-8")
    return {"rows": rows, "steady": steady, "replicas": replicas, "devices": devices, "microbatches": microbatches}


show = markdown(
    rows="{replicas} replicas × {devices} devices, {microbatches} micro-batches each. One step:",
    steady="Steps that overlap, with gradients in float32, from the end of one to that of the next; *shards* gathers "
    "parameters, for which the next step waits stage by stage:",
)


class _Arms:
    """One schedule with and without reductions."""

    def __init__(self, name: str, row: Shape, replicas: int, size: int, bucket: int) -> None:
        self._schedule, self._replicas = find_schedule(name), replicas
        self._row = Shape(row.devices * self._schedule.virtual, row.microbatches, row.devices)
        self._names, topology = _hosts(replicas, row.devices)
        costs, self._buckets = _costs(self._row.stages, replicas, size, bucket)
        self._costs = TopologyCosts(costs, topology)
        # Without computing, all reductions begin at 0.
        idle = {kind: [0.0] * self._row.stages for kind in COMPUTE_KINDS}
        self._bare = TopologyCosts(replace(costs, seconds=idle, sent=[0] * (self._row.stages - 1)), topology)

    def row(self) -> Figures:
        alone, tasks = report(simulate(self._graph(reduces=False), self._costs)), self._reduced(self._costs)
        bare = self._reduced(self._bare)
        computed, taken = _computed(alone), _after(bare)
        last = max(computed.values())
        seconds = {
            "tasks": tasks.seconds,
            "device": max(computed[name] + taken[name] for name in computed),
            "step": last + max(taken.values()),
        }
        gathered = {each.task.lane.device: each.end for each in bare.tasks if each.task.kind is TaskKind.GATHER}
        spans = {
            "tasks": _spans(tasks, self._graph(reduces=True)),
            "device": [(end, end + gathered[name]) for name, end in computed.items()],
        }
        row = {"alone_seconds": alone.seconds} | {f"{arm}_seconds": each for arm, each in seconds.items()}
        for arm, each in spans.items():
            added = (seconds[arm] - alone.seconds) / (seconds["step"] - alone.seconds)
            row[f"hidden_{arm}_share"] = 1 - added
            within = sum(max(0.0, min(end, last) - start) for start, end in each)
            row[f"within_{arm}_share"] = within / sum(end - start for start, end in each)
        return row

    def overlapping(self) -> Figures:
        kinds = {"alone": self._graph(reduces=False), "tasks": self._graph(reduces=True)}
        kinds["shards"] = self._graph(reduces=True, shards=True)
        records = {arm: simulate_steps(graph, self._costs, steps=3) for arm, graph in kinds.items()}
        return {f"{arm}_seconds": steady_state(reports(each)).seconds for arm, each in records.items()}

    def _graph(self, *, reduces: bool, shards: bool = False) -> TaskGraph:
        wiring = Wiring.chain(self._row.stages).in_rows(self._replicas, self._buckets, shards=shards)
        if not reduces:
            wiring = replace(wiring, reduces=(), updates=tuple(range(self._row.stages * self._replicas)))
        rows = self._replicas
        shape = Shape(self._row.stages * rows, self._row.microbatches * rows, self._row.devices * rows)
        return lower(self._schedule, shape, devices=self._names, wiring=wiring)

    def _reduced(self, costs: TopologyCosts) -> Report:
        return report(simulate(self._graph(reduces=True), costs))


def _computed(result: Report) -> dict[str, float]:
    """When each device has computed what its backwards give."""
    ends: dict[str, float] = {}
    for each in result.tasks:
        if each.task.kind in COMPUTE_KINDS:
            ends[each.task.lane.device] = max(each.end, ends.get(each.task.lane.device, 0.0))
    return ends


def _after(result: Report) -> dict[str, float]:
    """The seconds from the begin of the step to the end of what each device does behind its backwards."""
    ends: dict[str, float] = {}
    for each in result.tasks:
        ends[each.task.lane.device] = max(each.end, ends.get(each.task.lane.device, 0.0))
    return ends


def _spans(result: Report, graph: TaskGraph) -> list[tuple[float, float]]:
    """For each stage, from its last gradient to the end of its last G."""
    ended = {each.task.number: each.end for each in result.tasks}
    spans = dict.fromkeys(range(graph.shape.stages), (inf, 0.0))
    for each in result.tasks:
        if each.task.kind in COLLECTIVE_KINDS:
            start, end = spans[each.task.stage]
            if each.task.kind is TaskKind.REDUCE:
                start = min(start, max(ended[maker] for maker in graph.read_by(each.task.number)))
            spans[each.task.stage] = start, max(end, each.end)
    return list(spans.values())


def _hosts(replicas: int, devices: int) -> tuple[list[str], Topology]:
    """Each device with a link of its own to those at its place in other replicas, and to all in its own."""
    names = [[f"r{row}d{device}" for device in range(devices)] for row in range(replicas)]
    inside = {frozenset(pair): NetworkLink(5e-6, INSIDE) for row in names for pair in combinations(row, 2)}
    hosts = tuple(Host(name, ("cuda:0",)) for row in names for name in row)
    topology = Topology(hosts, NetworkLink(1e-5, LINK / max(1, replicas - 1)), links=inside)
    return list(topology.devices), topology


def _costs(stages: int, replicas: int, size: int, bucket: int) -> tuple[StageCosts, list[int]]:
    """The costs of stages that take about equally long, and the number of their buckets."""
    tokens = SEQUENCES * LENGTH
    # Multiplications and additions, of weights and of attention (causal, so half of it); embeddings compute nothing.
    block = tokens * (2 * 12 * WIDTH**2 + 2 * LENGTH * WIDTH)
    flops = [0.0, *[float(block)] * BLOCKS, 2.0 * tokens * WIDTH * VOCABULARY]
    parameters = [VOCABULARY * WIDTH + LENGTH * WIDTH, *[12 * WIDTH**2] * BLOCKS, VOCABULARY * WIDTH]
    rows, weights, start = [], [], 0
    for layers in even_balance(flops, stages):
        rows.append(sum(flops[start : start + layers]) / FLOPS)
        weights.append(sum(parameters[start : start + layers]))
        start += layers
    seconds = dict.fromkeys((TaskKind.FORWARD, TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT), rows)
    counts = [-(-each * size // bucket) for each in weights]
    costs = StageCosts(
        seconds,
        sent=[tokens * WIDTH * 2] * (stages - 1),
        buckets=[[each * size // count] * count for each, count in zip(weights, counts, strict=True)],
        rows=replicas,
        reducing=MEMORY / 2,
        update=[each * 28 / MEMORY for each in weights],  # AdamW reads and writes 28 bytes of each.
    )
    return costs, counts


# The picture


class _Waits(torch.autograd.Function):
    """A layer's time without its work. Weights get a gradient from the last micro-batch of a step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: _WaitingLayer, *weights: Tensor) -> Tensor:
        time.sleep(layer.seconds)
        ctx.layer, ctx.weights = layer, weights
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        time.sleep(2 * ctx.layer.seconds)
        ctx.layer.backwards += 1
        is_last = ctx.layer.backwards % ctx.layer.microbatches == 0
        return gradient, None, *(torch.ones_like(each) if is_last else None for each in ctx.weights)


class _WaitingLayer(nn.Module):
    def __init__(self, seconds: float, microbatches: int, elements: int) -> None:
        super().__init__()
        self.seconds, self.microbatches, self.backwards = seconds, microbatches, 0
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(elements // 4)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Waits.apply(x, self, *self.weights)  # type: ignore[no-untyped-call]
        return found


class _Recorder:
    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def step_completed(self, record: StepRecord) -> None:
        self.records.append(record)


def _picture(microbatches: int = 6, seconds: float = 0.03, elements: int = 4 << 20) -> str:
    """The shortest of ten steps of 2 replicas × 4 stages by 1f1b."""
    recorder = _Recorder()
    model = nn.Sequential(*(_WaitingLayer(seconds, microbatches, elements) for _ in range(4)))
    devices = [[f"cpu:{4 * row + device}" for device in range(4)] for row in range(2)]
    x = torch.zeros(2 * microbatches, 1, requires_grad=True)
    options: dict[str, Any] = {"schedule": "1f1b", "loss_fn": nn.functional.mse_loss, "checkpoint": "never"}
    pipe = Pipeline(model, devices, microbatches=microbatches, optimizer=torch.optim.SGD, **options)
    pipe.observers.append(recorder)
    with pipe.sync() as running:
        for _ in range(10):
            running.step(x, torch.zeros_like(x), return_outputs=False)
    record = min(recorder.records[1:], key=lambda each: report(each).seconds)
    return svg_timeline(record, title="1f1b, 2 replicas × 4 stages: reductions lie in the cool-down bubble")
