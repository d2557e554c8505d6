"""Memory of optimizers in shards: each of R replicas has 1/R of the states, which are counted by their bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.cases import loss_fn
from asyncpipe.bench.harness import markdown
from asyncpipe.pipeline.pipeline import Pipeline
from benchmarks.cases import CASES

__all__ = ["run", "show"]

REPLICAS = (2, 3, 4)


def run(progress: Progress) -> Figures:
    """A row for each number of replicas."""
    case = CASES["broad"]
    whole = _state_bytes(1, shards=False)[0]
    rows = []
    for replicas in REPLICAS:
        progress(f"{replicas} replicas")
        states = _state_bytes(replicas, shards=True)
        rows.append(
            {
                "replicas": replicas,
                "MB of states": [each / 1e6 for each in states],
                "most, times 1/R": max(states) / whole * replicas,
                "least, times 1/R": min(states) / whole * replicas,
            }
        )
    return {"about": case.about, "whole": f"{whole / 1e6:.1f}", "rows": rows}


show = markdown(rows="States of Adam for {about}: {whole} MB in all. By replica, with shards:")


def _state_bytes(replicas: int, *, shards: bool) -> list[int]:
    """Of each replica."""
    case = CASES["broad"]
    names = [f"cpu:{row}" for row in range(replicas)]
    options: dict[str, Any] = {"optimizer": torch.optim.Adam, "shard_optimizer": shards, "balance": [case.stages]}
    with Pipeline(case.model(), names, microbatches=1, replicas=replicas, loss_fn=loss_fn, **options).sync() as pipe:
        pipe.step(*case.batch())
        return [
            sum(value.nbytes for state in each.state.values() for value in state.values() if isinstance(value, Tensor))
            for each in pipe.optimizers.values()
        ]
