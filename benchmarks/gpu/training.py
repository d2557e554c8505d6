"""Whole models: one GPU as one and as two logical devices, against plain torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe import SyncPipeline, TaskKind
from asyncpipe.ops.device.devices import resolve_devices
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import GptShape, gpt_batch, gpt_layers, gpt_loss, mean_square, piped, tanh_layers
from benchmarks.gpu.outcome import Figure, Outcome, at_least, at_most, check, seen
from benchmarks.gpu.tasks import task_spans
from benchmarks.gpu.values import tried
from benchmarks.unet import memory as unet_memory
from benchmarks.unet import speed as unet_speed

__all__: list[str] = []


@check("Do F and B take the device as long inside a pipeline as alone?", 2)
def stage_alone(machine: Machine) -> Outcome:
    """A stage of 4 large layers in bf16: medians of its tasks by the device's clock, against the same kernels alone."""
    width, samples, dtype = (4096, 4096, torch.bfloat16) if machine.cuda else (64, 64, torch.float32)
    torch.manual_seed(0)
    model = tanh_layers(width, 4).to(machine.device, dtype)
    x = torch.randn(4 * samples, width, device=machine.device, dtype=dtype)
    part = x[:samples].clone().requires_grad_()
    forward = machine.kernel_seconds(lambda: model(part))
    both = machine.kernel_seconds(lambda: torch.autograd.backward(mean_square(model(part))))
    found: dict[TaskKind, list[float]] = {}
    with piped(nn.Sequential(model), machine.one, balance=[1]) as pipe:
        for _ in range(8):
            record = pipe.step(x, return_outputs=False).wait().record
            spans = task_spans(record)
            for task in record.graph.tasks:
                begin, end = spans[task.number]
                found.setdefault(task.kind, []).append(end - begin)
    f, b = (sorted(found[kind])[len(found[kind]) // 2] for kind in (TaskKind.FORWARD, TaskKind.BACKWARD))
    return Outcome(
        [
            seen("F and B alone", both * 1e3, "ms"),
            at_most("F and B in tasks, over alone", (f + b) / both, 1.05, "×"),
            at_most("F in a task, with its loss, over alone", f / forward, 1.2, "×"),
        ]
    )


@check(
    "How fast does GPT-2 small's shape train on one GPU, as one and two logical devices, against plain torch?",
    2,
    8,
    13,
    limit=150,
)
def gpt2_small(machine: Machine) -> Outcome:
    """bf16, 8 texts of 1,024 tokens in 4 micro-batches, nothing recomputed; eager, with CUDA graphs, and compiled.

    A plain loop over the same micro-batches is the reference of each. A micro-batch is some 1.5 TFLOP: 5 ms.
    """
    shape, dtype = (GptShape(), torch.bfloat16) if machine.cuda else (GptShape(2, 32, 2, 64, 16), torch.float32)
    x, target = gpt_batch(shape, 8, machine.device)
    tokens, times = x.numel(), 8 if machine.cuda else 3
    half = (shape.blocks + 2) // 2
    figures: list[Figure] = []

    def plain_loop(model: nn.Module) -> None:
        for values, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
            torch.autograd.backward(gpt_loss(model(values), wanted) / 4)
        model.zero_grad()

    def per_second(seconds: float) -> float:
        return tokens / seconds / 1e3

    plain = nn.Sequential(*gpt_layers(shape, machine.device, dtype))
    reference = machine.median_seconds(partial(plain_loop, plain), times)
    figures.append(seen("plain torch, eager", per_second(reference), "thousand tokens a second"))
    ways: list[tuple[str, Any, float, float]] = [("eager", False, 0.95, 0.9)]
    if machine.cuda:
        ways += [("graphs", "cudagraphs", 1.0, 0.95), ("compiled", True, 1.1, 1.0)]
    for name, option, one, two in ways:
        for devices, least in ((machine.one, one), (machine.two, two)):
            if option is True and devices == machine.one:
                continue  # Compiling takes some 25 s; plain torch has the same graph.
            made = gpt_layers(shape, machine.device, dtype)
            balance = [half, len(made) - half] if len(devices) == 2 else [len(made)]
            options: dict[str, Any] = {"balance": balance, "loss_fn": gpt_loss, "compile": option}
            title = f"{name}, {len(devices)} logical device{'s' if len(devices) == 2 else ''}"
            seconds = tried(partial(_step_seconds, machine, made, devices, options, x, target, times))
            figures.append(at_least(f"{title}, over plain eager torch", reference / seconds, least, "×"))
            print(f"{title}: {reference / seconds:.3f} ×", flush=True)
    if machine.cuda:
        compiled: Any = torch.compile(plain)
        seconds = machine.median_seconds(partial(plain_loop, compiled), times)
        figures.append(seen("plain torch, compiled, over eager", reference / seconds, "×"))
    return Outcome(figures)


def _step_seconds(
    machine: Machine,
    made: list[nn.Module],
    devices: list[str],
    options: dict[str, Any],
    x: Tensor,
    target: Tensor,
    times: int,
) -> float:
    def step(pipe: SyncPipeline) -> None:
        pipe.step(x, target, return_outputs=False)
        for each in made:
            each.zero_grad()

    with piped(made, devices, **options) as pipe:
        return machine.median_seconds(partial(step, pipe), times)


def _quiet(text: str) -> None:
    print(text, flush=True)


def _unet_speed(machine: Machine, size: unet_speed.UNetSpeedSize, least: float) -> Outcome:
    found = unet_speed.run(_quiet, resolve_devices(machine.one)[0], size)
    figures = [seen("the bare model", found["bare_per_second"], "pictures a second")]
    for arm in found["arms"]:
        mode, bound = arm["checkpoint"], arm["measured_bound"]
        figures.append(at_least(f"{mode}: step over bare", arm["step_over_bare"], least * bound, "×"))
        figures.append(at_least(f"{mode}: pipe(x) over bare", arm["dropin_over_bare"], least * bound, "×"))
    return Outcome(figures, "expected: that much of the bound by recomputation, as measured")


@check("How fast is a small U-Net as a pipeline of one stage, against the bare model?", 2, limit=90)
def unet_small(machine: Machine) -> Outcome:
    """U-Net (5, 32): kernels so short that the host decides."""
    small = unet_speed.UNetSpeedSize(depth=3, convs=5, channels=32, image=96, samples=16, warm_up=1, rounds=5)
    tiny = unet_speed.UNetSpeedSize(depth=2, convs=1, channels=8, image=16, samples=2, warm_up=0, rounds=1)
    return _unet_speed(machine, small if machine.cuda else tiny, 0.85)


@check(
    "How fast is U-Net (5, 64) as a pipeline of one stage, against the bare model?",
    2,
    limit=200,
    needs_gpu="on a CPU it takes hours",
)
def unet_throughput(machine: Machine) -> Outcome:
    """The torchgpipe paper has 0.858 of the bare model's pictures a second for ``except_last``, whose bound is 6/7."""
    size = unet_speed.UNetSpeedSize(depth=5, convs=5, channels=64, image=192, samples=40, warm_up=1, rounds=4)
    return _unet_speed(machine, size, 0.97)


@check("How much larger a U-Net trains as a pipeline in the memory of the bare one?", 10, limit=240)
def unet_parameters(machine: Machine) -> Outcome:
    """The torchgpipe paper has 6.1 times the parameters, with (11, 128)."""
    paper = unet_memory.UNetMemorySize(
        depth=5, convs=6, channels=72, image=192, samples=32, microbatches=32, searched=(11,)
    )
    tiny = unet_memory.UNetMemorySize(depth=1, convs=1, channels=4, image=8, samples=8, microbatches=8, searched=(1,))
    size = paper if machine.cuda else tiny
    found = unet_memory.run(_quiet, resolve_devices(machine.one)[0], size, values=True)
    best = max(found["pipelines"], key=lambda row: row["parameters"])
    return Outcome(
        [
            at_least("times the parameters", found["ratio"], 5.8, "×"),
            seen("the bare model's peak", found["bare"]["peak_bytes"] / 2**30, "GiB"),
        ],
        f"the largest is ({best['convs']}, {best['channels']})",
    )
