"""U-Net, memory: the largest model that a pipeline of one stage trains in the memory of a bare model.

A bare model holds the activations of the whole mini-batch, the pipeline those of one micro-batch, so that what is
left of the limit is for parameters and gradients (see ``bench/unet.py``). Peaks include both, and all temporaries.
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
from asyncpipe.bench.meter import ByteMeter, CountedExecutor
from asyncpipe.bench.unet_model import loss_fn, make_batch, make_model, parameter_count
from asyncpipe.errors import TaskError
from asyncpipe.ops.device.devices import Device
from asyncpipe.pipeline.pipeline import Pipeline

__all__ = ["SIZES", "Size", "counted_peak", "largest_channels", "run", "show"]

STATE_BYTES = 2 * 4
"""Of a parameter and its gradient."""


@dataclass(frozen=True, slots=True)
class Size:
    """The bare model, its mini-batch, and in how many micro-batches and which B the pipeline is searched."""

    depth: int
    convs: int
    channels: int
    image: int
    samples: int
    microbatches: int
    searched: tuple[int, ...]


# Activations outweigh parameters alike in both: pictures × pixels on the lowest level / channels is 16.
SIZES = {
    "small": Size(depth=3, convs=6, channels=18, image=24, samples=32, microbatches=32, searched=(6, 11)),
    "paper": Size(depth=5, convs=6, channels=72, image=192, samples=32, microbatches=32, searched=(6, 11)),
}


@dataclass(frozen=True, slots=True)
class Way:
    """How a model is trained: in a pipeline, by ``step`` or by ``loss(pipe(x)).backward()``."""

    name: str
    checkpoint: str
    dropin: bool = False


STEP = Way("step", "except_last")
OTHERS = (Way("step", "never"), Way("pipe(x)", "except_last", dropin=True))
"""Other ways to train the largest model that ``STEP`` can. In 1F1B, one stage never holds two micro-batches."""


def run(progress: Progress, device: Device, size: Size, *, values: bool) -> Figures:
    """The bare model's peak, the largest pipeline within it for each B, and the best one trained in other ways.

    Without ``values``, on a CPU, bytes are counted and nothing is computed.
    """

    def peak(convs: int, channels: int, way: Way | None) -> float:
        progress(f"memory: U-Net ({convs}, {channels}), {way.name + ' ' + way.checkpoint if way else 'bare'}")
        if device.is_cuda:
            return _allocated_peak(size, convs, channels, way, device)
        return counted_peak(size, convs, channels, way, device, values=values)

    limit = peak(size.convs, size.channels, None)
    bare = _row(size, size.convs, size.channels, limit)
    pipelines = []
    for convs in size.searched:
        parameters = partial(parameter_count, size.depth, convs)
        pipelines.append(_row(size, convs, *largest_channels(partial(peak, convs, way=STEP), parameters, limit)))
    best = max(pipelines, key=lambda row: row["parameters"])
    peak_of_best = partial(peak, best["convs"], best["channels"])
    # Tensors without values cannot be on two threads at once, as in a backward of the caller's.
    others = [way for way in OTHERS if best["channels"] and (values or not way.dropin)]
    return {
        "depth": size.depth,
        "image": size.image,
        "samples": size.samples,
        "microbatches": size.microbatches,
        "counted": not device.is_cuda,
        "bare": bare,
        "pipelines": pipelines,
        "ratio": best["parameters"] / bare["parameters"],
        "most_possible": limit / STATE_BYTES / bare["parameters"],
        "other_ways": [
            {"way": way.name, "checkpoint": way.checkpoint, **best, "peak_bytes": peak_of_best(way)} for way in others
        ],
    }


def _row(size: Size, convs: int, channels: int, peak_bytes: float) -> Figures:
    parameters = parameter_count(size.depth, convs, channels) if channels else 0
    return {"convs": convs, "channels": channels, "parameters": parameters, "peak_bytes": peak_bytes}


def show(figures: Figures) -> str:
    """The bare model, the largest pipeline for each B, and the best one trained in other ways."""
    bare = figures["bare"]

    def row(label: str, model: Figures) -> str:
        name = f"({model['convs']}, {model['channels']})"
        times = model["parameters"] / bare["parameters"]
        return f"{label:23}{name:14}{model['parameters'] / 1e6:10.2f} M{model['peak_bytes'] / 2**20:14.2f}{times:9.2f}×"

    how = "counted" if figures["counted"] else "allocated"
    first = STEP.checkpoint
    return "\n".join(
        [
            f"memory: depth {figures['depth']}, {figures['samples']} pictures of {figures['image']}×{figures['image']} "
            f"in {figures['microbatches']} micro-batches; peaks {how}, in MiB",
            f"{'':23}{'U-Net (B, C)':14}{'parameters':>12}{'peak':>14}{'over bare':>10}",
            row("bare", bare),
            *(row(f"{STEP.name}, {first}", model) for model in figures["pipelines"]),
            f"parameters and gradients alone would fill that memory at {figures['most_possible']:.2f}×",
            "the largest one, trained otherwise",
            *(row(f"{model['way']}, {model['checkpoint']}", model) for model in figures["other_ways"]),
        ]
    )


def largest_channels(peak: Callable[[int], float], parameters: Callable[[int], int], limit: float) -> tuple[int, float]:
    """The most channels, an even number, whose peak is within ``limit``, and that peak; (0, 0) if two are too many.

    Peaks must grow with the channels, and may be infinite. What is in them beside parameters and gradients is about
    proportional to the channels: taken to be so, the next guess mostly finds the border, and is no more than a guess.
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
    size: Size, convs: int, channels: int, way: Way | None, device: Device, *, values: bool = True
) -> float:
    """Peak bytes of one training step on a CPU, counted: parameters, gradients, activations and temporaries."""
    meter = ByteMeter(values=values)
    with meter.counting():
        model = make_model(size.depth, convs, channels)
        if not values:
            meter.keep_in_place(model)
        batch = make_batch(size.samples, size.image, device)
        meter.restart()
        _train(size, model, *batch, way, device, executors=partial(CountedExecutor, meter=meter))
    return meter.peak


def _allocated_peak(size: Size, convs: int, channels: int, way: Way | None, device: Device) -> float:
    """Peak bytes of one training step on a CUDA device, as torch's allocator has them; infinite if it runs out."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device.physical)
    try:
        with device.physical:
            model = make_model(size.depth, convs, channels)
        batch = make_batch(size.samples, size.image, device)
        torch.cuda.reset_peak_memory_stats(device.physical)
        _train(size, model, *batch, way, device)
        torch.cuda.synchronize(device.physical)
    except (torch.OutOfMemoryError, TaskError) as error:
        if not isinstance(error.__cause__ or error, torch.OutOfMemoryError):
            raise
        return math.inf
    return torch.cuda.max_memory_allocated(device.physical) - before


def _train(
    size: Size, model: nn.Sequential, x: Tensor, target: Tensor, way: Way | None, device: Device, **options: Any
) -> None:
    """One training step from no gradients to gradients."""
    if way is None:
        torch.autograd.backward(loss_fn(model(x), target))
        return
    pipeline = Pipeline(
        model,
        [device.name],
        microbatches=size.microbatches,
        checkpoint=way.checkpoint,
        loss_fn=loss_fn,
        **options,
    )
    with pipeline.sync() as pipe:
        if way.dropin:
            torch.autograd.backward(loss_fn(pipe(x), target))
        else:
            pipe.step(x, target, return_outputs=False)
