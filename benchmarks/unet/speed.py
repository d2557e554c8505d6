"""U-Net, speed: a pipeline of one stage on one device against the bare model.

The pipeline runs twice the bare model's batch in two micro-batches, so that kernels are equally large in all arms: the
difference is recomputation and the pipeline itself. No arm runs an optimizer: per picture it would cost the pipeline
less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import markdown, medians, rounds
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.report import Report
from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.device.intra_op_threads import IntraOpThreads
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.sync import SyncPipeline
from benchmarks.unet.model import loss_fn, make_batch, make_model, parameter_count

__all__ = ["SIZES", "UNetSpeedSize", "run", "show"]

MICROBATCHES = 2
RECOMPUTED = {"never": 0.0, "except_last": 1 / MICROBATCHES, "always": 1.0}
"""The part of a mini-batch's forwards that run twice, by recomputation mode."""


@dataclass(frozen=True, slots=True)
class UNetSpeedSize:
    """The model, the bare model's batch, and the number of rounds."""

    depth: int
    convs: int
    channels: int
    image: int
    samples: int
    warm_up: int = 1
    rounds: int = 9


SIZES = {
    "small": UNetSpeedSize(depth=3, convs=5, channels=32, image=48, samples=4),
    "paper": UNetSpeedSize(depth=5, convs=5, channels=64, image=192, samples=40, warm_up=2),
}


def run(progress: Progress, device: Device, size: UNetSpeedSize) -> Figures:
    """The speed of every arm relative to the bare model, in pictures per second: medians over rounds."""
    with _lone_thread() as caller, ExitStack() as stack:
        arms = caller.submit(_Arms, device, size, stack).result()
        numbers = rounds(size.warm_up + size.rounds, progress, "speed: round")
        rows = [caller.submit(arms.round).result() for _ in numbers]
    columns = medians(rows[size.warm_up :])
    share = columns.pop("forward_share")
    bare = columns.pop("bare")
    return {
        **asdict(size),
        "microbatches": MICROBATCHES,
        "parameters": parameter_count(size.depth, size.convs, size.channels),
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


show = markdown(
    arms="Speed: U-Net ({convs}, {channels}), depth {depth}, {parameters} parameters, {image}×{image} pictures, "
    "{microbatches} micro-batches of {samples}; by recomputation, over the bare model's {bare_per_second:.2f} pictures "
    "a second, medians of {rounds} rounds. Bound: a forward is 1/3 of a step, or {forward_share:.3f} as measured:",
)


@contextmanager
def _lone_thread() -> Iterator[ThreadPoolExecutor]:
    """A pool of one thread with one intra-op thread, like the thread of a CPU device."""
    threads = IntraOpThreads(1)
    with ThreadPoolExecutor(1, initializer=threads.initializer()) as pool:
        pool.submit(int).result()
        threads.wait()
        yield pool


class _Arms:
    """The bare model, and a pipeline around the same model for each recomputation mode."""

    def __init__(self, device: Device, size: UNetSpeedSize, stack: ExitStack) -> None:
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
        """Seconds of the bare model; for every arm, its speed over that of the bare model just before it."""
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
        """The seconds of ``work``, with all of the device's work, and its result."""
        self._synchronize()
        start = time.perf_counter()
        result = work()
        self._synchronize()
        seconds = time.perf_counter() - start
        self._model.zero_grad()
        return seconds, result

    def _synchronize(self) -> None:
        if self._device.is_accelerator:
            torch.cuda.synchronize(self._device.physical)


def _train(model: nn.Module | SyncPipeline, x: Tensor, target: Tensor) -> None:
    torch.autograd.backward(loss_fn(model(x), target))


def _forward_share(report: Report) -> float:
    """The part of the device's compute time that forwards take in a step without recomputation."""
    forwards = sum(time.seconds for time in report.tasks if time.task.kind is TaskKind.FORWARD)
    return forwards / sum(report.device_busy.values())
