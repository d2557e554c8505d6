"""Checks of what runs beside what: steps, copies, inputs, the host and the device; and of the clock that shows it."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncpipe import Costs, StepRecord, SyncPipeline, TaskKind, simulate_steps
from asyncpipe.core.schedules.backward_first import BackwardFirst
from benchmarks.gpu.machine import Machine, cuda
from benchmarks.gpu.models import (
    Delayed,
    FunctionLayer,
    batch,
    busy_stages,
    delay,
    layers,
    mean_square,
    mse,
    off,
    piped,
    stage,
    take_gradients,
)
from benchmarks.gpu.outcome import Outcome, at_least, at_most, check, seen
from benchmarks.gpu.tasks import host_seconds, task_spans

__all__: list[str] = []


class BusyLinear(nn.Linear):
    """Forward, gradient of the input and gradient of the weight take so many seconds each."""

    def __init__(self, machine: Machine, seconds: float, width: int = 8) -> None:
        super().__init__(width, width)
        self.machine, self.seconds = machine, seconds

    def forward(self, x: Tensor) -> Tensor:
        seconds, machine = self.seconds, self.machine
        weight = Delayed.apply(self.weight, 0.0, seconds, machine)  # type: ignore[no-untyped-call]
        return functional.linear(Delayed.apply(x, seconds, seconds, machine), weight, self.bias)  # type: ignore[no-untyped-call]


@check("Do steps overlap, also where the loss of each is read before the next one ends?", 4, 15, limit=90)
def steps_overlap(machine: Machine) -> Outcome:
    """Tasks of 2 ms, 4 micro-batches on 2 devices; what overlapping may bring at most is simulated."""
    seconds, steps, microbatches = 0.002, 30 if machine.cuda else 5, 4
    x = torch.randn(microbatches, 8, device=machine.device)
    figures = []
    for schedule in ("1f1b", "zb-h2"):
        found = {}
        model = nn.Sequential(*(BusyLinear(machine, seconds) for _ in range(2)))
        sgd: Any = partial(torch.optim.SGD, lr=1e-4)
        with piped(model, machine.two, schedule=schedule, microbatches=microbatches, optimizer=sgd) as pipe:
            pipe.step(x).wait()
            for way in ("step", "steps", "steps, losses read"):
                found[way] = min(_step_seconds(machine, pipe, way, x, steps) for _ in range(2 if machine.cuda else 1))
            costs = Costs(
                forward=seconds, backward=2 * seconds, input_gradient=seconds, weight_gradient=seconds, update=0.0
            )
            alone, behind = (_period(simulate_steps(pipe.graph, costs, steps=4, ahead=ahead)) for ahead in (0, 1))
        gained = found["step"] / found["steps"]
        figures += [
            at_most(f"{schedule}: step over its simulation", found["step"] / alone, 1.05, "×"),
            at_least(f"{schedule}: step over steps", gained, max(1.0, 0.97 * alone / behind), "×"),
            at_most(
                f"{schedule}: steps whose losses are read, over steps",
                found["steps, losses read"] / found["steps"],
                1.03,
                "×",
            ),
        ]
    return Outcome(figures)


def _step_seconds(machine: Machine, pipe: SyncPipeline, way: str, x: Tensor, steps: int) -> float:
    machine.synchronize()
    began = time.perf_counter()
    if way == "step":
        for _ in range(steps):
            pipe.step(x, return_outputs=False)
    else:
        for result in pipe.steps([x] * steps, return_outputs=False):
            if way.endswith("read"):
                assert result.loss is not None
                result.loss.item()
    machine.synchronize()
    return (time.perf_counter() - began) / steps


def _period(records: Sequence[StepRecord]) -> float:
    """Seconds from the end of a simulated step to the end of the next."""
    ends = [max(end for _, end in task_spans(record).values()) for record in records]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


@check(
    "May the caller overwrite a batch when step returns, also a pinned one?",
    5,
    needs_gpu="on a CPU a batch is read when step returns",
)
def pinned_batch(machine: Machine) -> Outcome:
    """The batch is filled with NaN at once, while the caller's stream, which the copies wait for, is busy for 50 ms."""
    x, target, trials, figures = batch(10), batch(10).flip(0), 10, []
    for kind in ("pageable", "pinned"):
        wrong, returned = 0, []
        for _ in range(trials):
            model = layers()
            given = [each.pin_memory() if kind == "pinned" else each.clone() for each in (x, target)]
            with piped(model, machine.two, loss_fn=mse) as pipe:
                machine.synchronize()
                machine.busy(0.05)
                began = time.perf_counter()
                result = pipe.step(*given)
                returned.append(time.perf_counter() - began)
                for each in given:
                    each.fill_(math.nan)
                wrong += off(x, target, [result.wait().loss, *take_gradients(model)]) > 1e-10
        figures.append(at_most(f"{kind}: wrong", wrong, 0, f"of {trials}", promised=True))
        figures.append(seen(f"{kind}: step returns after", median(returned) * 1e3, "ms"))
    return Outcome(figures)


@check("Do inputs come to the device beside compute?", 5, needs_gpu="on a CPU inputs are where they are needed")
def inputs_beside_compute(machine: Machine) -> Outcome:
    """8 micro-batches of 32 MiB, pinned, whose forwards take 4 ms each; against the same batch on the GPU.

    At 50 GB/s a copy takes 0.7 ms: behind the first one, none should hold up a forward.
    """
    model = nn.Sequential(
        nn.Sequential(FunctionLayer(_first_column), nn.Linear(8, 8), FunctionLayer(delay(machine, 0.004)))
    )
    x = torch.randn(8, 1 << 23)
    found = {}
    with piped(model, machine.one, microbatches=8) as pipe:
        for name, given in (("on the GPU", x.to(machine.device)), ("pinned", x.pin_memory()), ("pageable", x)):
            found[name] = machine.median_seconds(lambda: pipe.step(given, return_outputs=False), 7)  # noqa: B023
    return Outcome(
        [
            seen("a step whose batch is on the GPU", found["on the GPU"] * 1e3, "ms"),
            at_most("more, pinned", (found["pinned"] - found["on the GPU"]) * 1e3, 2.0, "ms"),
            seen("more, pageable", (found["pageable"] - found["on the GPU"]) * 1e3, "ms"),
        ]
    )


def _first_column(x: Tensor) -> Tensor:
    return x[:, :8].clone()


@check("Do copies between CPU and GPU run beside compute, and how fast?", 5, needs_gpu="CPU devices hand tensors over")
def copy_overlap(machine: Machine) -> Outcome:
    """Messages of 32 MiB from a CPU stage to a GPU stage whose tasks take 20 ms."""
    x = torch.randn(8, 1 << 23)
    model = nn.Sequential(nn.PReLU(), nn.Sequential(nn.PReLU(), FunctionLayer(delay(machine, 0.02))))
    with piped(model, machine.mixed, microbatches=8, balance=[1, 1], intra_op_threads=4) as pipe:
        for _ in range(3):
            record = pipe.step(x, return_outputs=False).wait().record
    spans, host = task_spans(record), host_seconds(record)
    gpu = [task for task in record.graph.tasks if task.lane.device == "cuda:0"]
    copies = {task.number: spans[task.number] for task in gpu if task.kind is TaskKind.COPY}
    compute = [spans[task.number] for task in gpu if task.kind is not TaskKind.COPY]
    took = [end - begin for begin, end in copies.values()]
    pairs = product(copies.values(), compute)
    beside = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs) / sum(took)
    size, pinned = x[0].nbytes / 1e9, x[0].pin_memory()
    plain, pageable = (
        machine.median_seconds(partial(each.to, machine.device, non_blocking=True)) for each in (pinned, x[0])
    )
    return Outcome(
        [
            at_least("copies to the GPU beside compute", beside * 100, 80, "%"),
            at_least("a copy", size / median(took), 0.8 * size / plain, "GB/s"),
            seen("a plain one from pinned memory", size / plain, "GB/s"),
            seen("a plain one from pageable memory", size / pageable, "GB/s"),
            at_most("a copy holds the host for", median(host[task] for task in copies) * 1e3, 1.0, "ms"),
        ]
    )


@check("Does the host run ahead, and how long does the GPU idle under rules that wait for completion?", 2, 6)
def host_ahead(machine: Machine) -> Outcome:
    """Kernels of 2 ms: how much longer than the ideal a step takes, and after how much of it ``step`` returns."""
    two_ahead = type("TwoAhead", (BackwardFirst,), {"ahead": 2})()
    seconds, microbatches = 0.002, 16 if machine.cuda else 4
    ideal, x = (microbatches + 1) * 2 * seconds, batch(microbatches).to(machine.device)
    schedules: dict[str, tuple[Any, str, float]] = {
        "1f1b": ("1f1b", "strict", 2.0),
        "1f1b as hint": ("1f1b", "hint", 5.0),
    }
    schedules |= {"backward-first": ("backward-first", "strict", 15.0)}
    schedules |= {"backward-first, 2 ahead": (two_ahead, "strict", 5.0)}
    figures = []
    for name, (schedule, order, most) in schedules.items():
        rows = []
        options = {"microbatches": microbatches, "schedule": schedule, "order": order}
        with piped(busy_stages(machine, seconds), machine.two, **options) as pipe:
            for _ in range(8 if machine.cuda else 3):
                machine.synchronize()
                began = time.perf_counter()
                result = pipe.step(x, return_outputs=False)
                returned = time.perf_counter() - began
                rows.append((result.wait().report.seconds / ideal - 1, returned / ideal))
        longer, returns = (median(column) for column in zip(*rows[-5:], strict=True))
        figures.append(at_most(f"{name}: longer than ideal", longer * 100, most, "%"))
        figures.append(seen(f"{name}: step() returns after", returns * 100, "% of it"))
    return Outcome(figures)


@check("Does the host go on at once where a loss says what it counted?", 4, needs_gpu="on a CPU nothing is waited for")
def counted_loss(machine: Machine) -> Outcome:
    """A forward of 20 ms on the GPU; how long it holds the host, and calls of torch that wait for the device."""
    x, tensor, figures = batch(8).to(machine.device), torch.ones((), device=machine.device), []
    counts: dict[str, Any] = {"no count": None, "a number": 1, "a tensor": tensor}
    for name, count in counts.items():
        loss_fn = mean_square if count is None else lambda output, count=count: (mean_square(output), count)
        with piped(nn.Sequential(stage(delay(machine, 0.02))), machine.one, loss_fn=loss_fn) as pipe:
            pipe.step(x).wait()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                record = pipe.step(x).wait().record
                torch.cuda.set_sync_debug_mode("default")
        host = host_seconds(record)
        held = max(host[task.number] for task in record.graph.tasks if task.kind is TaskKind.FORWARD)
        waits = sum("called a synchronizing CUDA operation" in str(each.message) for each in caught)
        figures.append(at_most(f"{name}: a forward holds the host for", held * 1e3, 10.0, "ms", promised=True))
        figures.append(at_most(f"{name}: calls that wait", waits, 0, "a step"))
    return Outcome(figures)


@check("Are the journal's times those of the device, on all lanes alike?", 11)
def journal_clocks(machine: Machine) -> Outcome:
    """Ends of forwards by events of the check's own, in steps one after the other and after 5 s without one."""
    ends: dict[int, list[Any]] = {}
    off_by, early_by = [], []

    def mark() -> Any:
        if not machine.cuda:
            return time.perf_counter()
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def marked(number: int, x: Tensor) -> Tensor:
        passed: Tensor = delay(machine, 0.005)(x)
        ends.setdefault(number, []).append(mark())
        return passed

    def measured(record: StepRecord) -> Iterator[float]:
        """The most that a forward's end is off, and that a task begins before one that it waits for has ended."""
        journal, last = task_spans(record), mark()
        machine.synchronize()
        now = time.perf_counter()
        truth = {
            number: [now - each.elapsed_time(last) * 1e-3 if machine.cuda else each for each in of]
            for number, of in ends.items()
        }
        forwards = [task for task in record.graph.tasks if task.kind is TaskKind.FORWARD]
        yield max(abs(journal[task.number][1] - truth[task.stage][task.microbatch]) for task in forwards)
        yield max(journal[edge.dependency][1] - journal[edge.task][0] for edge in record.graph.edges())

    stages = nn.Sequential(*(stage(partial(marked, number)) for number in range(2)))
    with piped(stages, machine.two) as pipe:
        for step in range(1, 7):
            time.sleep((5 if machine.cuda else 1) if step == 6 else 0)
            ends.clear()
            late, early = measured(pipe.step(batch(8).to(machine.device)).wait().record)
            off_by.append(late * 1e6)
            early_by.append(max(0.0, early * 1e6))
    most = 500 if machine.cuda else 500_000
    return Outcome(
        [
            at_most("a forward's end is off by", max(off_by), most, "µs", promised=True),
            at_most("begins before what it waits for ended", max(early_by), most, "µs", promised=True),
            seen("off by, after a pause", off_by[-1], "µs"),
        ]
    )
