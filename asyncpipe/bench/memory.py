"""Peak memory kept for the backward, with and without recomputation, over the number of micro-batches.

GPipe's schedule runs every forward of a mini-batch before the first backward. Without recomputation the activations of
the whole mini-batch are kept until then. With it, only those of one micro-batch are kept at a time, and the inputs of
the stages, from which recomputation starts (GPipe, Huang et al. 2019, section 2.3)::

    never          activations of the whole mini-batch
    except_last    activations of a micro-batch, 1/m of them, + the stage inputs of the whole mini-batch

So the bytes that autograd saves shrink by m, and the sum of both by less. With several stages the former may shrink by
slightly less than m: while two stages work on different micro-batches, the tensor at their border exists twice, as
a recomputed output and as a saved input. Bytes are counted (``byte_counters.py``), not read from an allocator.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.byte_counters import SavedBytes
from asyncpipe.bench.harness import mlp
from asyncpipe.pipeline.pipeline import Pipeline

__all__ = ["MemorySize", "run", "show"]

SCHEDULE = "gpipe"
MODES = ("never", "except_last")


@dataclass(frozen=True, slots=True)
class MemorySize:
    """The model, the mini-batch, and the numbers of micro-batches and stages that are compared."""

    width: int = 256
    layers: int = 8
    samples: int = 2048
    microbatches: tuple[int, ...] = (2, 4, 8, 16, 32)
    stages: tuple[int, ...] = (1, 2)


def run(progress: Progress, *, size: MemorySize | None = None) -> Figures:
    """Peak bytes by stages and micro-batches: saved by autograd, stage inputs (``borders``), and both together."""
    size = size or MemorySize()
    rows = []
    for stages in size.stages:
        for microbatches in size.microbatches:
            progress(f"stages {stages}, micro-batches {microbatches}")
            peaks = {mode: _peaks(size, stages, microbatches, mode) for mode in MODES}
            never, recomputed = (peaks[mode] for mode in MODES)
            rows.append(
                {
                    "stages": stages,
                    "microbatches": microbatches,
                    **{mode: {f"{name}_bytes": value for name, value in peaks[mode].items()} for mode in MODES},
                    "saved_ratio": never["saved"] / recomputed["saved"],
                    "total_ratio": never["total"] / recomputed["total"],
                }
            )
    return {"width": size.width, "layers": size.layers, "samples": size.samples, "schedule": SCHEDULE, "rows": rows}


def show(figures: Figures) -> str:
    """A table in MiB."""
    lines = [
        f"(Linear({figures['width']}) + ReLU) × {figures['layers']}, {figures['samples']} samples, "
        f"{figures['schedule']}: counted peaks in MiB of what waits for a backward",
        "saved by autograd; inputs of the stages except the first, whose input the caller holds; and both",
        "",
        f"{'never':>31}{'except_last':>27}",
        "stages    m      saved     total      saved    inputs     total   ratio of saved   of total",
    ]
    for row in figures["rows"]:
        never, recomputed = (row[mode] for mode in MODES)
        lines.append(
            f"{row['stages']:6}{row['microbatches']:5} {_mib(never['saved_bytes'])} {_mib(never['total_bytes'])} "
            f" {_mib(recomputed['saved_bytes'])} {_mib(recomputed['borders_bytes'])} {_mib(recomputed['total_bytes'])}"
            f"{row['saved_ratio']:17.2f}{row['total_ratio']:11.2f}"
        )
    return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / 2**20:9.3f}"


class _CountedLayer(nn.Module):
    """A layer whose ``forward`` counts the bytes that autograd saves in it."""

    def __init__(self, layer: nn.Module, saved: SavedBytes, *, first: bool) -> None:
        super().__init__()
        self.layer = layer
        self._saved = saved
        self._first = first

    def forward(self, x: Tensor) -> Any:
        if self._first:
            self._saved.note_input(x)
        with self._saved.watching():
            return self.layer(x)


def _peaks(size: MemorySize, stages: int, microbatches: int, checkpoint: str) -> dict[str, int]:
    """Peak bytes in one step: ``saved``, ``borders`` and ``total``, as in ``SavedBytes``."""
    torch.manual_seed(0)
    x, target = torch.randn(size.samples, size.width), torch.randn(size.samples, size.width)
    layers = mlp(size.width, size.layers)
    saved = SavedBytes([x, target, *layers.parameters()])
    starts = [stage * size.layers // stages for stage in range(stages + 1)]
    counted = [_CountedLayer(layer, saved, first=position in starts) for position, layer in enumerate(layers)]

    def loss_fn(output: Tensor, wanted: Tensor) -> Tensor:
        with saved.watching():
            return nn.functional.mse_loss(output, wanted)

    pipeline = Pipeline(
        nn.Sequential(*counted),
        [f"cpu:{stage}" for stage in range(stages)],
        microbatches=microbatches,
        balance=[end - start for start, end in pairwise(starts)],
        schedule=SCHEDULE,
        checkpoint=checkpoint,
        loss_fn=loss_fn,
    )
    with pipeline.sync() as pipe:
        # The first forward of a stage works on a copy of its input, to see whether it overwrites it.
        pipe.step(x, target, return_outputs=False)
        saved.restart()
        pipe.step(x, target, return_outputs=False)
    return saved.peak
