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
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.ops.model.stage_factory import StageFactory
from asyncpipe.pipeline.pipeline import Pipeline

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
    """Bytes by case: of the controller at its peak and in the end, and of each worker at its peak."""
    size = size or RssSize()
    rows = []
    for case in CASES:
        progress(case)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            rows.append({"case": case, **fresh.submit(_measured, case, size).result()})
    # The weights and biases, as float32.
    model = STAGES * size.layers * (size.width + 1) * size.width * 4
    return {"model_bytes": model, "stages": STAGES, "rows": rows}


def show(figures: Figures) -> str:
    """A table in MB."""
    lines = [
        f"a model of {_mb(figures['model_bytes'])} MB in {figures['stages']} stages on as many CPU devices, SGD: "
        "resident memory in MB",
        "(an idle process that has imported torch and asyncpipe has what the controller has at its start)",
        "",
        "            controller                      each worker",
        "case         start      peak   at the end   at its peak",
    ]
    for row in figures["rows"]:
        workers = ", ".join(_mb(each) for each in row["worker_peaks"]) or "-"
        start, peak, end = (_mb(row[f"controller_{name}"]) for name in ("start", "peak", "end"))
        lines.append(f"{row['case']:8}{start:>10}{peak:>10}{end:>13}   {workers}")
    return "\n".join(lines)


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f}"


def _measured(case: str, size: RssSize) -> dict[str, Any]:
    """One case, in a process of its own."""
    start = _status(os.getpid(), "VmRSS")
    found: dict[str, Any] = asyncio.run(_train(case, size))
    return {"controller_start": start, **found}


async def _train(case: str, size: RssSize) -> dict[str, Any]:
    model: Any = StageFactory(make_stage, stages=STAGES, arguments={"size": size})
    if case != "built":
        model = [make_stage(stage, size) for stage in range(STAGES)]
    pipe = Pipeline(
        model,
        [f"cpu:{stage}" for stage in range(STAGES)],
        microbatches=STAGES,
        loss_fn=nn.functional.mse_loss,
        optimizer=_sgd,
        workers="threads" if case == "threads" else "processes",
    )
    del model
    x = torch.randn(size.samples, size.width)
    async with pipe:
        for _ in range(STEPS):
            await pipe.step(x, x, return_outputs=False)
        here = os.getpid()
        return {
            "controller_peak": _status(here, "VmHWM"),
            "controller_end": _status(here, "VmRSS"),
            "worker_peaks": [_status(pid, "VmHWM") for pid in _children(here)],
        }


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = (child for task in tasks for child in (task / "children").read_text().split())
    # Python's own helper of ``multiprocessing`` is no worker.
    return sorted(
        int(child) for child in children if b"asyncpipe/worker" in Path(f"/proc/{child}/cmdline").read_bytes()
    )


def _status(pid: int, key: str) -> int:
    """A line of the kernel's about a process, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise LookupError(key)
