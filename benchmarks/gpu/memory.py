"""Checks of memory: does it stay, what does it cost to be ahead, and is it what the planner says?"""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch
from torch import nn

from asyncpipe import Pipeline
from asyncpipe.core.predict.planner import plan
from asyncpipe.pipeline.profiling import SampleBatch, measure
from benchmarks.byte_counters import ByteMeter, CountedExecutor
from benchmarks.gpu.machine import Machine, cuda
from benchmarks.gpu.models import GptShape, gpt_batch, gpt_layers, gpt_loss, mean_square, piped, tanh_layers
from benchmarks.gpu.outcome import Outcome, at_least, at_most, check, seen

__all__: list[str] = []


@check("Does memory stay what it is over 200 steps?", 10, limit=120)
def memory_growth(machine: Machine) -> Outcome:
    """Bytes after the last step more than after half of them: allocated, reserved and pinned."""
    width, steps = (512, 200) if machine.cuda else (16, 10)
    figures = []
    ways = {"step": 1, "step, waited for now and then": 20, "pipe(x)": 1, "step on CPU and GPU": 1}
    for way, wait in ways.items():
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1)) for _ in range(4)))
        x, kept = torch.randn(64, width), []
        inside = None if way == "pipe(x)" else torch.optim.AdamW
        devices = machine.mixed if "CPU" in way else machine.two
        with piped(model, devices, optimizer=inside, checkpoint="except_last") as pipe:
            for number in range(1, steps + 1):
                if inside is None:
                    torch.autograd.backward(mean_square(pipe(x)))
                else:
                    result: Any = pipe.step(x)
                    if number % wait == 0:
                        result.wait()
                    del result
                model.zero_grad()
                if number in (steps // 2, steps):
                    kept.append(_held(machine))
        allocated, reserved, pinned = (last - middle for middle, last in zip(*kept, strict=True))
        figures.append(at_most(f"{way}: allocated", allocated, 0, "bytes", promised=True))
        if machine.cuda:  # Reserves may differ by a block or two.
            figures.append(
                at_most(f"{way}: reserved or pinned", max(reserved, pinned), 64 << 20, "bytes", promised=True)
            )
    return Outcome(figures)


def _held(machine: Machine) -> tuple[int, int, int]:
    """Allocated, reserved and pinned bytes; on a CPU, bytes of all tensors."""
    machine.synchronize()
    gc.collect()
    if not machine.cuda:
        return sum(value.nbytes for value in gc.get_objects() if issubclass(type(value), torch.Tensor)), 0, 0
    statistics = cuda.host_memory_stats() if hasattr(cuda, "host_memory_stats") else {}
    pinned = statistics.get("allocated_bytes.current", 0)
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pinned


@check(
    "Does a device that is further ahead hold more memory?",
    10,
    needs_gpu="a CPU device is never ahead: its tasks are done when they are issued",
)
def memory_in_flight(machine: Machine) -> Outcome:
    """The peak of a step with 4 and 16 tasks in flight, of layers that take the device 1 ms and more each.

    What was told of another stream counts until the device has used it, so blocks that are *active* are looked at. A
    device with a program has so many tasks as take 20 ms, and at least 4: the same at both, up to a tensor a device.
    """
    rows, width, stages = 8192, 2048, 2
    tensor = rows * width * 4
    x = torch.randn(8 * rows, width, device=machine.device)
    peaks, seconds = {}, {}
    for in_flight in (4, 16):
        torch.manual_seed(0)
        model = nn.Sequential(*(tanh_layers(width, 6) for _ in range(stages)))
        with piped(model, machine.two, microbatches=8, balance=[1, 1], in_flight=in_flight) as pipe:
            seconds[in_flight] = machine.median_seconds(lambda: pipe.step(x, return_outputs=False).wait(), 4)
            torch.cuda.reset_peak_memory_stats()
            pipe.step(x, return_outputs=False).wait()
            peaks[in_flight] = torch.cuda.memory_stats()["active_bytes.all.peak"]
    return Outcome(
        [
            seen("4 in flight", peaks[4] / 2**20, "MiB"),
            at_most("16 in flight, more", (peaks[16] - peaks[4]) / tensor, stages, "tensors of a micro-batch"),
            at_most("a step with 4 in flight over one with 16", seconds[4] / seconds[16], 1.02, "×"),
        ]
    )


@check("Is the peak what plan says, where the loss is large?", 10, limit=90)
def memory_by_plan(machine: Machine) -> Outcome:
    """A GPT-2 with a large vocabulary on two logical devices; the plan's sum of both against the allocator's peak.

    On a CPU the bytes of all tensors are counted.
    """
    shape = GptShape(blocks=4, tokens=512) if machine.cuda else GptShape(2, 32, 2, 2000, 16)
    microbatches, balance = 4, [3, 3] if machine.cuda else [2, 2]
    x, target = gpt_batch(shape, 4 * microbatches, machine.device)
    made = gpt_layers(shape, machine.device, torch.float32)
    sgd = partial(torch.optim.SGD, lr=1e-4)
    sample = SampleBatch(x, target, gpt_loss, optimizer=sgd)
    profile = measure(made, machine.two, sample, [microbatches], steps=2)
    options: dict[str, Any] = {"schedules": ["1f1b"], "checkpoints": ["never"], "balances": lambda *_: [balance]}
    predicted = plan(profile, 2, parameter_scale=2, **options)[0].memory
    chosen: dict[str, Any] = {"microbatches": microbatches, "balance": balance, "loss_fn": gpt_loss, "optimizer": sgd}
    if machine.cuda:
        with piped(made, machine.two, **chosen) as pipe:
            for _ in range(2):
                pipe.step(x, target, return_outputs=False).wait()
            torch.cuda.reset_peak_memory_stats()
            pipe.step(x, target, return_outputs=False).wait()
            peak = torch.cuda.max_memory_allocated()
    else:
        meter = ByteMeter()
        pipeline = Pipeline(
            made, machine.two, checkpoint="never", executors=partial(CountedExecutor, meter=meter), **chosen
        )
        for layer in made:
            for parameter in layer.parameters():
                meter.add(parameter)
        with meter.counting(), pipeline.sync() as pipe:
            for _ in range(2):
                pipe.step(x, target, return_outputs=False).wait()
            meter.restart()
            pipe.step(x, target, return_outputs=False).wait()
        peak = meter.peak
    return Outcome(
        [
            seen("the plan's bytes", sum(predicted) / 2**20, "MiB"),
            seen("the peak", peak / 2**20, "MiB"),
            at_most("the peak over the plan", peak / sum(predicted), 1.1, "×"),
            at_least("the peak over the plan", peak / sum(predicted), 0.7, "×"),
        ]
    )
