"""Resident memory of the controller and of its workers: a model that is sent there, and one that is built there.

Each case has a controller of its own, a fresh process, which makes a few training steps (SGD) of a large model on 4 CPU
devices, and reads what the kernel says of itself and its workers (``/proc``, so this needs Linux)::

    threads    the model is here
    sent       the model is made here, and its stages are sent to 4 workers
    built      a StageFactory builds each stage in its worker
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch import nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import rollup_bytes, status_bytes, worker_pids
from asyncpipe.ops.model.stage_factory import StageFactory
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.pool import DevicePool

__all__ = ["RssSize", "make_stage", "run", "show"]

CASES = ("threads", "sent", "built")
STAGES = 4
STEPS = 2


@dataclass(frozen=True, slots=True)
class RssSize:
    """A model of 403 MB in 4 stages."""

    width: int = 2048
    layers: int = 6
    """Of each stage."""
    samples: int = 16


def make_stage(stage: int, size: RssSize) -> nn.Module:
    """One of the stages, for a factory."""
    layers: list[nn.Module] = []
    for _ in range(size.layers):
        layers += [nn.Linear(size.width, size.width), nn.Tanh()]
    return nn.Sequential(*layers)


def run(progress: Progress, *, size: RssSize | None = None) -> Figures:
    """Bytes by case: of the controller at its start, its peak and its end, and of each worker by what takes them."""
    size = size or RssSize()
    rows = []
    for case in CASES:
        progress(case)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            rows.append({"case": case, **fresh.submit(_measured, case, size).result()})
    return {"stage_bytes": _stage_bytes(size), "stages": STAGES, "rows": rows}


def _stage_bytes(size: RssSize) -> int:
    """The weights and biases of a stage, as float32."""
    return size.layers * (size.width + 1) * size.width * 4


def show(figures: Figures) -> str:
    """A table in MB."""
    stage, stages = figures["stage_bytes"], figures["stages"]
    lines = [
        f"a model of {_mb(stage * stages)} MB in {stages} stages on as many CPU devices, SGD: resident memory in MB",
        "",
        "controller    start      peak   at the end",
    ]
    for row in figures["rows"]:
        start, peak, end = (_mb(row[f"controller_{name}"]) for name in ("start", "peak", "end"))
        lines.append(f"{row['case']:8}{start:>11}{peak:>10}{end:>13}")
    lines += [
        "",
        "each worker: what its peak is made of, and what it has after the steps (PSS counts memory that several",
        "processes share, as libraries are, in parts)",
        "",
        "            imports  optimizers   weights  gradients   the rest    peak     end  end, PSS",
    ]
    for row in figures["rows"]:
        for worker in row["workers"]:
            parts = _mb(worker["imports"]), _mb(worker["optimizers"]), _mb(worker["weights"]), _mb(stage)
            rest = _mb(worker["peak"] - worker["imports"] - worker["optimizers"] - worker["weights"] - stage)
            ends = _mb(worker["peak"]), _mb(worker["end"]), _mb(worker["end_share"])
            widths = zip((*parts, rest, *ends), (11, 12, 10, 11, 11, 8, 8, 10), strict=True)
            lines.append(f"{row['case']:8}" + "".join(f"{value:>{width}}" for value, width in widths))
    return "\n".join(lines)


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f}"


def _measured(case: str, size: RssSize) -> dict[str, Any]:
    """One case, in a process of its own."""
    start = status_bytes(os.getpid(), "VmRSS")
    found: dict[str, Any] = asyncio.run(_train(case, size))
    return {"controller_start": start, **found}


async def _train(case: str, size: RssSize) -> dict[str, Any]:
    model: Any = StageFactory(make_stage, stages=STAGES, arguments={"size": size})
    here, workers = os.getpid(), case != "threads"
    async with DevicePool(workers="processes" if workers else "threads") as pool:
        imports = await _after(pool, train=False) if workers else {}
        optimizers = await _after(pool, train=True) if workers else {}
        if case != "built":
            model = [make_stage(stage, size) for stage in range(STAGES)]
        pipe = _pipeline(model, pool, train=True)
        del model
        x = torch.randn(size.samples, size.width)
        async with pipe:
            loaded = {pid: rollup_bytes(pid, "Rss") for pid in imports}
            for _ in range(STEPS):
                await pipe.step(x, x, return_outputs=False)
            return {
                "controller_peak": status_bytes(here, "VmHWM"),
                "controller_end": status_bytes(here, "VmRSS"),
                "workers": [
                    {
                        "imports": imports[pid],
                        "optimizers": optimizers[pid] - imports[pid],
                        "weights": loaded[pid] - optimizers[pid],
                        "peak": status_bytes(pid, "VmHWM"),
                        "end": rollup_bytes(pid, "Rss"),
                        "end_share": rollup_bytes(pid, "Pss"),
                    }
                    for pid in imports
                ],
            }


async def _after(pool: DevicePool, *, train: bool) -> dict[int, int]:
    """By worker: what it has when a tiny pipeline has made a step there, with optimizers or without."""
    x = torch.randn(STAGES, 2)
    async with _pipeline([nn.Linear(2, 2) for _ in range(STAGES)], pool, train=train) as pipe:
        await pipe.train(train).step(x, x)
    return {pid: rollup_bytes(pid, "Rss") for pid in worker_pids(os.getpid())}


def _pipeline(model: Any, pool: DevicePool, *, train: bool) -> Pipeline:
    return Pipeline(
        model,
        [f"cpu:{stage}" for stage in range(STAGES)],
        microbatches=STAGES,
        loss_fn=nn.functional.mse_loss,
        optimizer=_sgd if train else None,
        pool=pool,
    )


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)
