"""The training steps of several benchmarks: small, middle-sized and large stages, and blocks of a transformer."""

from __future__ import annotations

from functools import partial

from torch import nn

from asyncpipe.bench.cases import Case, mlp

__all__ = ["CASES", "RATE"]

RATE = 1024.0
"""Of an update from which gradients are read as differences of weights: large, so that no digits are lost."""


def _blocks(width: int, count: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(count))
    )


def _wide(width: int, microbatches: int = 16) -> Case:
    about = f"2 stages of 4 × Linear({width})+ReLU, m={microbatches}, 64 rows each"
    return Case(about, 2, microbatches, (64, width), partial(mlp, width, 4))


_BLOCKS = "2 stages of 2 transformer blocks of width 256, m=8, 4 × 32 tokens each"
CASES = {
    "tiny": Case("4 stages of Linear(16)+ReLU, m=32, 4 rows each", 4, 32, (4, 16), partial(mlp, 16, 1)),
    "fine": _wide(256),
    "mid": _wide(512),
    "coarse": _wide(1024),
    "broad": _wide(1024, 4),
    "transformer": Case(_BLOCKS, 2, 8, (4, 32, 256), partial(_blocks, 256, 2)),
}
