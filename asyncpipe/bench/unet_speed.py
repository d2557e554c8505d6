"""U-Net, speed: a pipeline of one stage on one device against the bare model (see ``bench/unet.py``).

The pipeline does twice the bare model's batch in two micro-batches, so kernels are as large in all arms and what
is left are recomputation and the pipeline itself. No arm runs an optimizer, which would weigh less on the pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.rounds import drop_gradients, lone_thread, medians
from asyncpipe.bench.unet_model import loss_fn, make_batch, make_model, parameter_count
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.report import Report
from asyncpipe.ops.device.devices import Device
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.sync import SyncPipeline

__all__ = ["SIZES", "Size", "run", "show"]

MICROBATCHES = 2
RECOMPUTED = {"never": 0.0, "except_last": 1 / MICROBATCHES, "always": 1.0}
"""The share of a mini-batch's forward that runs twice, by recomputation mode."""


@dataclass(frozen=True, slots=True)
class Size:
    """The model, the bare model's batch, and the rounds."""

    depth: int
    convs: int
    channels: int
    image: int
    samples: int
    warm_up: int = 1
    rounds: int = 9


SIZES = {
    "small": Size(depth=3, convs=5, channels=32, image=48, samples=4),
    "paper": Size(depth=5, convs=5, channels=64, image=192, samples=40, warm_up=2),
}


def run(progress: Progress, device: Device, size: Size) -> Figures:
    """Pictures per second of every arm over the bare model's: medians over alternating rounds."""
    with lone_thread() as caller, ExitStack() as stack:
        arms = caller.submit(_Arms, device, size, stack).result()
        rounds = []
        for number in range(size.warm_up + size.rounds):
            progress(f"speed: round {number + 1} of {size.warm_up + size.rounds}")
            rounds.append(caller.submit(arms.round).result())
    columns = medians(rounds[size.warm_up :])
    share = columns.pop("forward_share")
    bare = columns.pop("bare")
    return {
        "convs": size.convs,
        "channels": size.channels,
        "depth": size.depth,
        "image": size.image,
        "samples": size.samples,
        "microbatches": MICROBATCHES,
        "parameters": parameter_count(size.depth, size.convs, size.channels),
        "rounds": size.rounds,
        "bare_per_second": size.samples / bare,
        "forward_share": share,
        "arms": [
            {
                "checkpoint": mode,
                "bound": 1 / (1 + recomputed / 3),
                "measured_bound": 1 / (1 + recomputed * share),
                "step_over_bare": columns[f"step {mode}"],
                "dropin_over_bare": columns[f"dropin {mode}"],
            }
            for mode, recomputed in RECOMPUTED.items()
        ],
    }


def show(figures: Figures) -> str:
    """A row for each recomputation mode; what is recomputed bounds a row's ratios."""
    measured = f"{figures['forward_share']:.3f}"
    lines = [
        f"speed: U-Net ({figures['convs']}, {figures['channels']}), depth {figures['depth']}, "
        f"{figures['parameters'] / 1e6:.1f} M parameters, {figures['image']}×{figures['image']} pictures, "
        f"{figures['microbatches']} micro-batches of {figures['samples']}",
        f"bare model {figures['bare_per_second']:.2f} pictures/s; ratios to it, medians of {figures['rounds']} rounds",
        f"recomputation   pipe.step    pipe(x)   bound (a forward is 1/3 of a step, or {measured} as measured)",
    ]
    rows = [
        f"{row['checkpoint']:13}{row['step_over_bare']:12.3f}{row['dropin_over_bare']:11.3f}"
        f"{row['bound']:8.3f}{row['measured_bound']:8.3f}"
        for row in figures["arms"]
    ]
    return "\n".join([*lines, *rows])


class _Arms:
    """The bare model, and pipelines with each recomputation mode around the same one."""

    def __init__(self, device: Device, size: Size, stack: ExitStack) -> None:
        torch.manual_seed(0)
        self._device = device
        with device.physical:
            self._model: nn.Sequential = make_model(size.depth, size.convs, size.channels)
        self._small = make_batch(size.samples, size.image, device)
        self._large = make_batch(MICROBATCHES * size.samples, size.image, device)
        self._pipes: dict[str, SyncPipeline] = {
            mode: stack.enter_context(
                Pipeline(self._model, [device.name], microbatches=MICROBATCHES, checkpoint=mode, loss_fn=loss_fn).sync()
            )
            for mode in RECOMPUTED
        }

    def round(self) -> dict[str, float]:
        """Seconds of the bare model; of every arm, pictures per second over those of the bare model just before."""
        bares, figures = [], {}
        for mode, pipe in self._pipes.items():
            arms: dict[str, Callable[[], Any]] = {
                "step": partial(pipe.step, *self._large, return_outputs=False),
                "dropin": partial(_train, pipe, *self._large),
            }
            for name, work in arms.items():
                bares.append(self._timed(partial(_train, self._model, *self._small))[0])
                seconds, result = self._timed(work)
                figures[f"{name} {mode}"] = MICROBATCHES * bares[-1] / seconds
                if (name, mode) == ("step", "never"):
                    figures["forward_share"] = _forward_share(result.wait().report)
        return {"bare": median(bares), **figures}

    def _timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        seconds, result = _on_cuda(self._device, work) if self._device.is_cuda else _on_cpu(work)
        drop_gradients(self._model)
        return seconds, result


def _train(model: nn.Module | SyncPipeline, x: Tensor, target: Tensor) -> None:
    torch.autograd.backward(loss_fn(model(x), target))


def _on_cpu(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def _on_cuda(device: Device, work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds between events on the caller's stream, behind which a pipeline's streams are ordered at both ends."""
    with torch.cuda.device(device.physical):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        result = work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, result


def _forward_share(report: Report) -> float:
    """The forwards' part of what the device computed in a step without recomputation."""
    forwards = sum(time.seconds for time in report.tasks if time.task.kind is TaskKind.FORWARD)
    return forwards / sum(report.device_busy.values())
