"""The gain of ``loss(pipe(x)).backward()`` on CPU devices over a backward by autograd's engine alone.

torchgpipe leaves the backward to autograd's engine. On CPU devices that overlaps nothing: the engine runs a CPU graph
in the thread that calls ``backward``, and the stages' forwards share one thread as well. Here the same stages and
micro-batches run in three ways, with one intra-op thread per thread::

    one thread    forward of every micro-batch through every stage, then the engine's backward
    pipe(x)       forward, the caller's loss, and the backward as a second task graph, on two devices
    pipe.step     forwards and backwards in one graph; not possible for pipe(x), because the caller computes the loss
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median

import torch
from torch import Tensor, nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import lone_thread, medians, mlp, rounds, seconds_of, table
from asyncpipe.core.graph.task import Queue
from asyncpipe.core.graph.task_graph import Phase
from asyncpipe.core.predict.report import report
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.ops.autograd.checkpoint import checkpoint
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.sync import SyncPipeline

__all__ = ["DropinSize", "all_busy", "engine_step", "run", "show"]

DEVICES = ("cpu:0", "cpu:1")
MODES = ("never", "always")
_loss = nn.functional.mse_loss


@dataclass(frozen=True, slots=True)
class DropinSize:
    """The model, and the number of rounds."""

    width: int = 1024
    layers: int = 8
    microbatches: int = 16
    samples: int = 128 * 16
    warm_up: int = 2
    rounds: int = 7


def run(progress: Progress, *, size: DropinSize | None = None) -> Figures:
    """Seconds of the three ways, and seconds in which both devices computed, without and with recomputation.

    Medians over rounds, each of which runs all six arms; ratios are taken within a round.
    """
    size = size or DropinSize()
    torch.manual_seed(0)
    x, target = torch.randn(size.samples, size.width), torch.randn(size.samples, size.width)
    with lone_thread() as caller, ExitStack() as stack:
        arms = {mode: _Arm(mode, size, stack) for mode in MODES}
        rows: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        for _ in rounds(size.warm_up + size.rounds, progress):
            for mode, arm in arms.items():
                rows[mode].append(caller.submit(arm.round, x, target).result())
    # After the pipelines are closed: a step's record may arrive a moment after its backward has returned.
    columns = {mode: {**medians(rows[mode][size.warm_up :]), **arm.busy(size.warm_up)} for mode, arm in arms.items()}
    return {**asdict(size), "checkpoint": columns}


def show(figures: Figures) -> str:
    """A row for each figure, a column for each recomputation mode."""
    modes = figures["checkpoint"]

    def busy(column: Figures, phase: Phase) -> str:
        return f"{column[f'{phase}_both_busy_seconds'] * 1e3:.0f} of {column[f'{phase}_seconds'] * 1e3:.0f} ms"

    columns = [
        {
            "recomputation": mode,
            "one thread, backward by the engine": f"{column['engine_seconds'] * 1e3:.1f} ms",
            "loss(pipe(x)).backward()": f"{column['dropin_seconds'] * 1e3:.1f} ms",
            "pipe.step(x, target)": f"{column['whole_step_seconds'] * 1e3:.1f} ms",
            "one thread / drop-in": f"{column['speedup']:.2f}",
            "drop-in / step": f"{column['dropin_over_step']:.3f}",
            **{f"both devices busy in the {phase}": busy(column, phase) for phase in Phase},
        }
        for mode, column in modes.items()
    ]
    head = (
        f"(Linear({figures['width']}) + ReLU) × {figures['layers']}, {figures['samples']} samples, "
        f"{figures['microbatches']} micro-batches; medians of {figures['rounds']} rounds"
    )
    return "\n".join([head, "", *table([label, *(column[label] for column in columns)] for label in columns[0])])


class _Arm:
    """The three ways to train one model with one recomputation mode, and an observer of its pipeline."""

    def __init__(self, mode: str, size: DropinSize, stack: ExitStack) -> None:
        torch.manual_seed(1)
        self._records: dict[Phase, list[StepRecord]] = {phase: [] for phase in Phase}
        self._size = size
        self._recompute = mode == "always"
        self._model = mlp(size.width, size.layers)
        half = size.layers // 2
        self._stages = [self._model[:half], self._model[half:]]
        pipeline = Pipeline(
            self._model,
            DEVICES,
            microbatches=size.microbatches,
            balance=[half, size.layers - half],
            checkpoint=mode,
            loss_fn=_loss,
            observers=[self],
        )
        self._pipe: SyncPipeline = stack.enter_context(pipeline.sync())

    def step_completed(self, record: StepRecord) -> None:
        """Keep the record of a graph."""
        self._records[record.graph.phase].append(record)

    def busy(self, warm_up: int) -> dict[str, float]:
        """Median seconds of each phase, and of its part in which all devices computed, without the first records."""
        figures: dict[str, float] = {}
        for phase, records in self._records.items():
            figures[f"{phase}_seconds"] = median(report(record).seconds for record in records[warm_up:])
            figures[f"{phase}_both_busy_seconds"] = median(all_busy(record) for record in records[warm_up:])
        return figures

    def round(self, x: Tensor, target: Tensor) -> dict[str, float]:
        """Seconds of each way, and their ratios."""
        microbatches, recompute = self._size.microbatches, self._recompute
        engine = self._seconds(lambda: engine_step(self._stages, x, target, microbatches, recompute=recompute))
        dropin = self._seconds(lambda: torch.autograd.backward(_loss(self._pipe(x), target)))
        step = self._seconds(lambda: self._pipe.step(x, target, return_outputs=False))
        return {
            "engine_seconds": engine,
            "dropin_seconds": dropin,
            "whole_step_seconds": step,
            "speedup": engine / dropin,
            "dropin_over_step": dropin / step,
        }

    def _seconds(self, work: Callable[[], object]) -> float:
        seconds = seconds_of(work)
        self._model.zero_grad()
        return seconds


def engine_step(
    stages: Sequence[nn.Module], x: Tensor, target: Tensor, microbatches: int, *, recompute: bool
) -> Tensor:
    """Run one training step in the calling thread and return its loss; gradients accumulate in the parameters.

    As in torchgpipe: the whole forward in micro-batches, then one backward by the engine.
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
    """The seconds during which all devices of the graph computed."""
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
