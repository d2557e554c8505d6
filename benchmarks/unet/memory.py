"""U-Net, memory: the largest model that a pipeline of one stage trains in the memory of a bare model.

A bare model holds the activations of the whole mini-batch, the pipeline those of one micro-batch; the rest of the limit
is left for parameters and gradients. Peaks include all of them, and temporaries.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import markdown
from asyncpipe.errors import TaskError
from asyncpipe.ops.device.devices import Device
from asyncpipe.pipeline.pipeline import Pipeline
from benchmarks.byte_counters import ByteMeter, CountedExecutor
from benchmarks.unet.model import loss_fn, make_batch, make_model, parameter_count

__all__ = ["SIZES", "UNetMemorySize", "counted_peak", "largest_channels", "run", "show"]

STATE_BYTES = 2 * 4
"""Bytes of a parameter and its gradient."""


@dataclass(frozen=True, slots=True)
class UNetMemorySize:
    """The bare model and its mini-batch; the pipeline's micro-batches, and the numbers of convolutions to search."""

    depth: int
    convs: int
    channels: int
    image: int
    samples: int
    microbatches: int
    searched: tuple[int, ...]


# Activations outweigh parameters alike in both: pictures × pixels on the lowest level / channels is 16.
SIZES = {
    "small": UNetMemorySize(depth=3, convs=6, channels=18, image=24, samples=32, microbatches=32, searched=(6, 11)),
    "paper": UNetMemorySize(depth=5, convs=6, channels=72, image=192, samples=32, microbatches=32, searched=(6, 11)),
}


@dataclass(frozen=True, slots=True)
class TrainingMode:
    """How a pipeline trains a model: by ``step`` or by ``loss(pipe(x)).backward()``, and what it recomputes."""

    name: str
    checkpoint: str
    dropin: bool = False


STEP = TrainingMode("step", "except_last")
OTHERS = (TrainingMode("step", "never"), TrainingMode("pipe(x)", "except_last", dropin=True))
"""Other ways to train the largest model found for ``STEP``. With 1F1B, one stage never holds two micro-batches."""


def run(progress: Progress, device: Device, size: UNetMemorySize, *, values: bool) -> Figures:
    """The bare model's peak, the largest pipeline within it for each B, and the best one trained in the other ways.

    Without ``values`` (CPU only) bytes are counted and nothing is computed.
    """

    def peak(convs: int, channels: int, mode: TrainingMode | None) -> float:
        progress(f"memory: U-Net ({convs}, {channels}), {mode.name + ' ' + mode.checkpoint if mode else 'bare'}")
        if device.is_accelerator:
            return _allocated_peak(size, convs, channels, mode, device)
        return counted_peak(size, convs, channels, mode, device, values=values)

    limit = peak(size.convs, size.channels, None)
    bare = _row(size, size.convs, size.channels, limit)
    pipelines = []
    for convs in size.searched:
        parameters = partial(parameter_count, size.depth, convs)
        pipelines.append(_row(size, convs, *largest_channels(partial(peak, convs, mode=STEP), parameters, limit)))
    best = max(pipelines, key=lambda row: row["parameters"])
    peak_of_best = partial(peak, best["convs"], best["channels"])
    # Tensors without values work on one thread only; a drop-in backward uses two.
    others = [mode for mode in OTHERS if best["channels"] and (values or not mode.dropin)]
    return {
        "depth": size.depth,
        "image": size.image,
        "samples": size.samples,
        "microbatches": size.microbatches,
        "counted": not device.is_accelerator,
        "bare": bare,
        "pipelines": pipelines,
        "ratio": best["parameters"] / bare["parameters"],
        "most_possible": limit / STATE_BYTES / bare["parameters"],
        "other_ways": [
            {"way": mode.name, "checkpoint": mode.checkpoint, **best, "peak_bytes": peak_of_best(mode)}
            for mode in others
        ],
    }


def _row(size: UNetMemorySize, convs: int, channels: int, peak_bytes: float) -> Figures:
    parameters = parameter_count(size.depth, convs, channels) if channels else 0
    return {"convs": convs, "channels": channels, "parameters": parameters, "peak_bytes": peak_bytes}


show = markdown(
    bare="Memory: depth {depth}, {samples} pictures of {image}×{image} in {microbatches} micro-batches; parameters and "
    "gradients alone would fill that memory at {most_possible:.2f} times the bare model's parameters. Bare:",
    pipelines=f"The largest pipelines, {STEP.name}, {STEP.checkpoint}; the best has {{ratio:.2f}} × the parameters:",
    other_ways="The largest one, trained in other ways:",
)


def largest_channels(peak: Callable[[int], float], parameters: Callable[[int], int], limit: float) -> tuple[int, float]:
    """The largest even number of channels whose peak is within ``limit``, and that peak; (0, 0) if two are too many.

    Peaks must grow with the channels, and may be infinite. A search by intervals: the next guess assumes that a peak
    beyond parameters and gradients is proportional to the channels, which is nearly so and mostly hits the border.
    """

    def too_much(channels: int, rest: float) -> bool:
        return STATE_BYTES * parameters(channels) + rest * channels > limit

    fits, too_many = 0, 2
    while not too_much(too_many, 0.0):
        too_many *= 2
    best, rest = 0.0, limit / 5 / too_many
    while too_many - fits > 2:
        guess = next((c for c in range(too_many - 2, fits + 2, -2) if not too_much(c, rest)), fits + 2)
        found = peak(guess)
        if found <= limit:
            fits, best = guess, found
        else:
            too_many = guess
        rest = (found - STATE_BYTES * parameters(guess)) / guess if math.isfinite(found) else 2 * rest
    return fits, best


def counted_peak(
    size: UNetMemorySize, convs: int, channels: int, mode: TrainingMode | None, device: Device, *, values: bool = True
) -> float:
    """Counted peak bytes of one training step on a CPU: parameters, gradients, activations and temporaries."""
    meter = ByteMeter(values=values)
    with meter.counting():
        model = make_model(size.depth, convs, channels)
        if not values:
            meter.keep_in_place(model)
        batch = make_batch(size.samples, size.image, device)
        meter.restart()
        _train(size, model, *batch, mode, device, executors=partial(CountedExecutor, meter=meter))
    return meter.peak


def _allocated_peak(
    size: UNetMemorySize, convs: int, channels: int, mode: TrainingMode | None, device: Device
) -> float:
    """Peak bytes of one training step on a CUDA device, from torch's allocator; infinite if memory runs out."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device.physical)
    try:
        with device.physical:
            model = make_model(size.depth, convs, channels)
        batch = make_batch(size.samples, size.image, device)
        torch.cuda.reset_peak_memory_stats(device.physical)
        _train(size, model, *batch, mode, device)
        torch.cuda.synchronize(device.physical)
    except (torch.OutOfMemoryError, TaskError) as error:
        if not isinstance(error.__cause__ or error, torch.OutOfMemoryError):
            raise
        return math.inf
    return torch.cuda.max_memory_allocated(device.physical) - before


def _train(
    size: UNetMemorySize,
    model: nn.Sequential,
    x: Tensor,
    target: Tensor,
    mode: TrainingMode | None,
    device: Device,
    **options: Any,
) -> None:
    """One training step without an optimizer, from no gradients to gradients."""
    if mode is None:
        torch.autograd.backward(loss_fn(model(x), target))
        return
    pipeline = Pipeline(
        model,
        [device.name],
        microbatches=size.microbatches,
        checkpoint=mode.checkpoint,
        loss_fn=loss_fn,
        **options,
    )
    with pipeline.sync() as pipe:
        if mode.dropin:
            torch.autograd.backward(loss_fn(pipe(x), target))
        else:
            pipe.step(x, target, return_outputs=False)
