"""What ``loss(pipe(x)).backward()`` gains where autograd's engine would run everything in one thread.

A drop-in pipeline that leaves its backward to the engine, as torchgpipe does, overlaps nothing on CPU devices: the
engine runs CPU graphs in the thread that calls ``backward``, and CPU stages share a thread in the forward too. Here
the same stages and micro-batches run three ways, in turn, in one process, with one intra-op thread per thread::

    one thread    forward of every micro-batch through every stage, then the engine's backward
    pipe(x)       forward, the caller's loss, and the backward as a graph of tasks behind it, on two devices
    pipe.step     forwards and backwards in one graph, which pipe(x) cannot have: the loss is the caller's
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor, nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.rounds import drop_gradients, lone_thread, medians
from asyncpipe.core.engine.events import StepRecord
from asyncpipe.core.graph.task import Queue
from asyncpipe.core.graph.task_graph import Phase
from asyncpipe.core.predict.report import report
from asyncpipe.ops.autograd.checkpoint import checkpoint
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.sync import SyncPipeline

__all__ = ["Size", "all_busy", "engine_step", "run", "show"]

DEVICES = ("cpu:0", "cpu:1")
MODES = ("never", "always")
_loss = nn.functional.mse_loss


@dataclass(frozen=True, slots=True)
class Size:
    """How large the model and the measurement are."""

    width: int = 1024
    layers: int = 8
    microbatches: int = 16
    samples: int = 128 * 16
    warm_up: int = 2
    rounds: int = 7


def run(progress: Progress, *, size: Size | None = None) -> Figures:
    """Seconds of the three ways, and seconds in which both devices computed, without and with recomputation.

    Medians over rounds that alternate between all six; ratios are of one round each.
    """
    size = size or Size()
    torch.manual_seed(0)
    x, target = torch.randn(size.samples, size.width), torch.randn(size.samples, size.width)
    with lone_thread() as caller, ExitStack() as stack:
        arms = {mode: _Arm(mode, size, stack) for mode in MODES}
        rounds: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        for number in range(size.warm_up + size.rounds):
            progress(f"round {number + 1} of {size.warm_up + size.rounds}")
            for mode, arm in arms.items():
                rounds[mode].append(caller.submit(arm.round, x, target).result())
    # Only now: a record may arrive a moment after its backward has returned.
    return {
        "width": size.width,
        "layers": size.layers,
        "samples": size.samples,
        "microbatches": size.microbatches,
        "rounds": size.rounds,
        "checkpoint": {
            mode: {**medians(rounds[mode][size.warm_up :]), **arm.recorder.busy(size.warm_up)}
            for mode, arm in arms.items()
        },
    }


def show(figures: Figures) -> str:
    """A row for each figure, a column for each recomputation mode."""
    columns = figures["checkpoint"]

    def row(label: str, text: Callable[[Figures], str]) -> str:
        return label.ljust(42) + "".join(text(column).rjust(18) for column in columns.values())

    def milliseconds(label: str, name: str) -> str:
        return row(label, lambda column: f"{column[name] * 1e3:.1f} ms")

    def busy(phase: str) -> str:
        def text(column: Figures) -> str:
            return f"{column[f'{phase}_both_busy_seconds'] * 1e3:.0f} of {column[f'{phase}_seconds'] * 1e3:.0f} ms"

        return row(f"both devices busy in the {phase}", text)

    return "\n".join(
        [
            f"(Linear({figures['width']}) + ReLU) × {figures['layers']}, {figures['samples']} samples, "
            f"{figures['microbatches']} micro-batches; medians of {figures['rounds']} rounds",
            "",
            "recomputation".ljust(42) + "".join(mode.rjust(18) for mode in columns),
            milliseconds("one thread, backward by the engine", "engine_seconds"),
            milliseconds("loss(pipe(x)).backward()", "dropin_seconds"),
            milliseconds("pipe.step(x, target)", "whole_step_seconds"),
            row("one thread / drop-in", lambda column: f"{column['speedup']:.2f}"),
            row("drop-in / step", lambda column: f"{column['dropin_over_step']:.3f}"),
            *(busy(phase) for phase in Phase),
        ]
    )


@dataclass(slots=True)
class _Recorder:
    """Keeps the records of a pipeline's graphs, by phase."""

    records: dict[Phase, list[StepRecord]] = field(default_factory=lambda: {phase: [] for phase in Phase})

    def step_completed(self, record: StepRecord) -> None:
        self.records[record.graph.phase].append(record)

    def busy(self, warm_up: int) -> dict[str, float]:
        """Seconds of each phase, and those in which all devices computed; medians without the first records."""
        figures: dict[str, float] = {}
        for phase, records in self.records.items():
            figures[f"{phase}_seconds"] = median(report(record).seconds for record in records[warm_up:])
            figures[f"{phase}_both_busy_seconds"] = median(all_busy(record) for record in records[warm_up:])
        return figures


class _Arm:
    """The three ways through one model with one recomputation mode."""

    def __init__(self, mode: str, size: Size, stack: ExitStack) -> None:
        torch.manual_seed(1)
        self.recorder = _Recorder()
        self._size = size
        self._recompute = mode == "always"
        self._model = _model(size)
        half = size.layers // 2
        self._stages = [self._model[:half], self._model[half:]]
        pipeline = Pipeline(
            self._model,
            DEVICES,
            microbatches=size.microbatches,
            balance=[half, size.layers - half],
            checkpoint=mode,
            loss_fn=_loss,
            observers=[self.recorder],
        )
        self._pipe: SyncPipeline = stack.enter_context(pipeline.sync())

    def round(self, x: Tensor, target: Tensor) -> dict[str, float]:
        """Seconds of each way, and their ratios."""
        engine = self._seconds(lambda: self._engine(x, target))
        dropin = self._seconds(lambda: torch.autograd.backward(_loss(self._pipe(x), target)))
        step = self._seconds(lambda: self._pipe.step(x, target, return_outputs=False))
        return {
            "engine_seconds": engine,
            "dropin_seconds": dropin,
            "whole_step_seconds": step,
            "speedup": engine / dropin,
            "dropin_over_step": dropin / step,
        }

    def _engine(self, x: Tensor, target: Tensor) -> None:
        engine_step(self._stages, x, target, self._size.microbatches, recompute=self._recompute)

    def _seconds(self, work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        drop_gradients(self._model)
        return seconds


def engine_step(
    stages: Sequence[nn.Module], x: Tensor, target: Tensor, microbatches: int, *, recompute: bool
) -> Tensor:
    """The loss of one training step in the calling thread, whose gradients are in the stages' parameters.

    This is how torchgpipe arranges it: the whole forward, in micro-batches, then one backward by the engine.
    """
    outputs = []
    for values in x.chunk(microbatches):
        for stage in stages:
            values = _recomputed(stage, values) if recompute else stage(values)
        outputs.append(values)
    loss = _loss(torch.cat(outputs), target)
    torch.autograd.backward(loss)
    return loss.detach()


def _recomputed(stage: nn.Module, values: Tensor) -> Tensor:
    return checkpoint(lambda tensors: [stage(*tensors)], [values])[0][0]


def all_busy(record: StepRecord) -> float:
    """The seconds in which every device of the graph computed at once."""
    changes = []
    for time_of in report(record).tasks:
        if time_of.task.lane.queue is Queue.COMPUTE:
            changes += [(time_of.start, 1), (time_of.end, -1)]
    seconds, busy, since = 0.0, 0, 0.0
    for at, change in sorted(changes):
        if busy == len(record.graph.devices):
            seconds += at - since
        busy, since = busy + change, at
    return seconds


def _model(size: Size) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(size.width, size.width), nn.ReLU()) for _ in range(size.layers)))
