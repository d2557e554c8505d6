"""Offload against recomputation in a given memory: bytes and time, predicted and measured, on a device of the CPU.

The device is taken to have a memory of its own: what O brings to the host is copied for real and not counted any more.
The device counts the storages that its tasks make (``byte_counters.py``), and fails above its limit as an accelerator
does. The limit is two thirds of what the step needs when everything is kept.

Times are those of steps without counting. A copy is work of the device's own thread here; the prediction is that of an
accelerator with such a bus, which computes beside its copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.byte_counters import ByteMeter
from asyncpipe.bench.harness import mlp, seconds_of, table
from asyncpipe.core.graph.lower import CheckpointMode, lower
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.layer_profile import Profile
from asyncpipe.core.predict.memory import peak_memory
from asyncpipe.core.predict.planner import plan
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import TaskError
from asyncpipe.ops.execute import offloading
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.profiling import SampleBatch, measure
from asyncpipe.runtime.executor import Completion
from asyncpipe.runtime.program_run import ProgramRun
from asyncpipe.runtime.thread_executor import ThreadExecutor

__all__ = ["OffloadSize", "run", "show"]

OVER = 1.5
"""By how much the step needs more than the limit, if everything is kept."""


@dataclass(frozen=True, slots=True)
class OffloadSize:
    """An MLP on one device, whose forwards all come before the first backward."""

    width: int = 128
    layers: int = 32
    samples: int = 8192
    microbatches: int = 8
    schedule: str = "gpipe"
    rounds: int = 5


class _Way(NamedTuple):
    name: str
    checkpoint: str
    offload: tuple[float, ...]


def run(progress: Progress, *, size: OffloadSize | None = None) -> Figures:
    """By way to keep activations: peaks and seconds, predicted and measured, and whether a step fits into the limit."""
    size = size or OffloadSize()
    with _own_memory():
        progress("measuring the layers")
        profile = _profile(size)
        ways = [
            _Way("kept", "never", ()),
            _Way("offloaded", "never", (1.0,)),
            _Way("recomputed", "always", ()),
        ]
        rows, limit, wanted = [], 0, list[Tensor]()
        for way in ways:
            progress(way.name)
            predicted, seconds = _predicted(size, profile, way)
            peak, gradients = _peak(size, way, None)
            limit = limit or round(peak / OVER)
            wanted = wanted or gradients
            rows.append(
                {
                    "name": way.name,
                    "predicted_bytes": predicted,
                    "bytes": peak,
                    "fits": _fits(size, way, limit),
                    "same_bits": all(map(torch.equal, gradients, wanted)),
                    "predicted_seconds": seconds,
                    "seconds": _seconds(size, way),
                }
            )
        progress("planning within the limit")
        chosen = plan(
            profile,
            1,
            schedules=[size.schedule],
            balances=lambda _: [[size.layers]],
            checkpoints=["never", "always"],
            memory_limit=limit,
            offload=True,
        )[0]
    return {
        **{name: getattr(size, name) for name in ("width", "layers", "samples", "microbatches", "schedule")},
        "limit_bytes": limit,
        "chosen": str(chosen),
        "rows": rows,
    }


def show(figures: Figures) -> str:
    """A row for each way."""
    head = ("", "peak, MiB", "predicted", "off by", "under the limit", "same bits", "step, ms", "predicted")
    rows = [
        (
            row["name"],
            f"{row['bytes'] / 2**20:.1f}",
            f"{row['predicted_bytes'] / 2**20:.1f}",
            f"{row['predicted_bytes'] / row['bytes'] - 1:+.1%}",
            "trains" if row["fits"] else "out of memory",
            "yes" if row["same_bits"] else "no",
            f"{row['seconds'] * 1e3:.0f}",
            f"{row['predicted_seconds'] * 1e3:.0f}",
        )
        for row in figures["rows"]
    ]
    return "\n".join(
        [
            f"(Linear({figures['width']}) + ReLU) × {figures['layers']} on one device, {figures['samples']} samples in "
            f"{figures['microbatches']} micro-batches, {figures['schedule']}",
            f"the limit is {figures['limit_bytes'] / 2**20:.1f} MiB of memory: {OVER} times less than what is kept",
            "",
            *table([head, *rows]),
            "",
            f"the planner's choice within the limit: {figures['chosen']}",
        ]
    )


@contextmanager
def _own_memory() -> Iterator[None]:
    """A CPU has memory of its own, inside."""
    offloading.HOST_TYPES.discard("cpu")
    try:
        yield
    finally:
        offloading.HOST_TYPES.add("cpu")


class _CountedDevice(ThreadExecutor):
    """A device whose tasks count what they make; what an offload makes is the host's."""

    def __init__(self, device: str, meter: ByteMeter) -> None:
        super().__init__(device)
        self._meter = meter

    def submit_program(self, run: ProgramRun) -> None:
        """Run it, counted."""
        call, tasks, meter = run.call, run.step.graph.tasks, self._meter

        def counted(task: int) -> Completion | None:
            if tasks[task].kind is TaskKind.OFFLOAD:
                return call(task)
            with meter.counting():
                return call(task)

        run.call = counted
        super().submit_program(run)


def _batch(size: OffloadSize) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    return mlp(size.width, size.layers), *torch.randn(2, size.samples, size.width)


def _pipeline(size: OffloadSize, model: nn.Sequential, way: _Way, meter: ByteMeter | None = None) -> Pipeline:
    return Pipeline(
        model,
        ["cpu:0"],
        microbatches=size.microbatches,
        schedule=size.schedule,
        checkpoint=way.checkpoint,
        offload=list(way.offload) or None,
        loss_fn=nn.functional.mse_loss,
        executors=None if meter is None else partial(_CountedDevice, meter=meter),
    )


def _peak(size: OffloadSize, way: _Way, limit: int | None) -> tuple[int, list[Tensor]]:
    """The most bytes in a step, parameters included, and the gradients."""
    model, x, target = _batch(size)
    held = sum(parameter.nbytes for parameter in model.parameters())
    meter = ByteMeter(limit=None if limit is None else limit - held)
    meter.ignore([*model.parameters(), x, target])
    with _pipeline(size, model, way, meter).sync() as pipe:
        pipe.step(x, target, return_outputs=False)
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        meter.restart()
        pipe.step(x, target, return_outputs=False)
    return meter.peak + held, gradients


def _fits(size: OffloadSize, way: _Way, limit: int) -> bool:
    try:
        _peak(size, way, limit)
    except TaskError as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            return False
        raise
    return True


def _seconds(size: OffloadSize, way: _Way) -> float:
    """The median of some steps on threads."""
    model, x, target = _batch(size)
    with _pipeline(size, model, way).sync() as pipe:

        def step() -> None:
            pipe.step(x, target, return_outputs=False)
            model.zero_grad()

        step()
        return median(seconds_of(step) for _ in range(size.rounds))


def _profile(size: OffloadSize) -> Profile:
    model, x, target = _batch(size)
    sample = SampleBatch(x, target, nn.functional.mse_loss)
    profile = measure(model, ["cpu:0"], sample, [size.microbatches], steps=2)
    probe = torch.zeros(32 << 20, dtype=torch.uint8)
    bus = probe.nbytes / min(seconds_of(probe.clone) for _ in range(5))
    measured = replace(profile.measurement(size.microbatches), host_bandwidth=bus)
    return replace(profile, measurements={size.microbatches: measured})


def _predicted(size: OffloadSize, profile: Profile, way: _Way) -> tuple[int, float]:
    """The peak in bytes, and seconds."""
    mode, m, balance = CheckpointMode(way.checkpoint), size.microbatches, [size.layers]
    graph = lower(find_schedule(size.schedule), Shape(1, m, 1), checkpoint=mode, offload=way.offload)
    record = simulate(graph, profile.costs(balance, m, mode))
    seconds = report(record).seconds + profile.measurement(m).step
    return max(peak_memory(record, profile.memory(balance, m))), seconds
