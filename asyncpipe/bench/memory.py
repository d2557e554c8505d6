"""How much waits for a backward, with recomputation and without, over the number of micro-batches.

Under GPipe's schedule every forward of a mini-batch comes before the first backward. Without recomputation all
activations of the mini-batch then wait; with it, those of one micro-batch at a time, and the inputs of the stages
instead, which are what a recomputation starts from (GPipe, Huang et al. 2019, section 2.3)::

    never          activations of the whole mini-batch
    except_last    activations of a micro-batch, 1/m of them, + what crossed the stage borders, whatever m is

So what autograd saves shrinks by m; the sum of both shrinks by less. With several stages the first may shrink by a
little less, too: while two of them work on different micro-batches, what crosses their border is there twice, once
as a recomputed output and once as a saved input. Bytes are counted (``bench/meter.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.meter import SavedBytes
from asyncpipe.pipeline.pipeline import Pipeline

__all__ = ["Size", "run", "show"]

SCHEDULE = "gpipe"
MODES = ("never", "except_last")


@dataclass(frozen=True, slots=True)
class Size:
    """The model, the mini-batch, and what is varied."""

    width: int = 256
    layers: int = 8
    samples: int = 2048
    microbatches: tuple[int, ...] = (2, 4, 8, 16, 32)
    stages: tuple[int, ...] = (1, 2)


def run(progress: Progress, *, size: Size | None = None) -> Figures:
    """Peak bytes for each number of stages and micro-batches: what autograd saves, borders, and both together."""
    size = size or Size()
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
    """The table; bytes in MiB."""
    lines = [
        f"(Linear({figures['width']}) + ReLU) × {figures['layers']}, {figures['samples']} samples, "
        f"{figures['schedule']}: counted peaks in MiB of what waits for a backward",
        "saved by autograd; inputs of stages but the first, whose input is the caller's; and either",
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


class _Watched(nn.Module):
    """A layer, and the bytes that its forward leaves for its backward."""

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


def _peaks(size: Size, stages: int, microbatches: int, checkpoint: str) -> dict[str, int]:
    """Peak bytes in one step: ``saved``, ``borders`` and ``total``, as ``SavedBytes`` has them."""
    torch.manual_seed(0)
    x, target = torch.randn(size.samples, size.width), torch.randn(size.samples, size.width)
    layers = [nn.Sequential(nn.Linear(size.width, size.width), nn.ReLU()) for _ in range(size.layers)]
    saved = SavedBytes([x, target, *(parameter for layer in layers for parameter in layer.parameters())])
    starts = [stage * size.layers // stages for stage in range(stages + 1)]
    watched = [_Watched(layer, saved, first=position in starts) for position, layer in enumerate(layers)]

    def loss_fn(output: Tensor, wanted: Tensor) -> Tensor:
        with saved.watching():
            return nn.functional.mse_loss(output, wanted)

    pipeline = Pipeline(
        nn.Sequential(*watched),
        [f"cpu:{stage}" for stage in range(stages)],
        microbatches=microbatches,
        balance=[end - start for start, end in pairwise(starts)],
        schedule=SCHEDULE,
        checkpoint=checkpoint,
        loss_fn=loss_fn,
    )
    with pipeline.sync() as pipe:
        pipe.step(x, target, return_outputs=False)
    return saved.peak
