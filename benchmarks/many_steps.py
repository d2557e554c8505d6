"""Many steps one after the other: by ``step``, and by ``steps``, where the next one begins before the last has ended.

All update each stage in the step. They take turns, each with all steps of a case at a time. ``steps`` does so with
clipping as well, by another pipeline: every update then waits for the norm of all gradients. From the
records of a turn come the step's time, each device's idle share from the first task of the turn to its last, and the
*border*: how long a device is idle between its last task of a step and its first of the next. In 1F1B the last device
has to wait there in any case, for the first one to end its step, update its stage and begin the next step: its bubble
is a chain of tasks that wait for each other, which overlapping steps cannot shorten. In ZB-H2 the first device ends its
step early, and the bubble is at the border alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Generator, nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.cases import loss_fn
from asyncpipe.bench.harness import markdown, medians, rounds, run_on_loop
from asyncpipe.core.checks import check_choice
from asyncpipe.core.graph.task import Queue
from asyncpipe.core.predict.report import reports
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.pipeline.pipeline import Pipeline
from benchmarks.cases import CASES
from benchmarks.examples import example_job, load_example
from benchmarks.turns import alternating

__all__ = ["MANY_STEPS", "ManySteps", "devices_idle", "run", "show"]

WAYS = ("step", "steps", "steps, clipped")


@dataclass(frozen=True, slots=True)
class ManySteps:
    """A pipeline on CPU devices with its optimizers, and its mini-batches."""

    about: str
    devices: int
    make: Callable[[], nn.Sequential]
    batches: Callable[[int], list[tuple[Any, Any]]]
    """So many mini-batches."""
    options: Callable[[], dict[str, Any]]
    """Of ``Pipeline``."""


def _plain(name: str, schedule: str) -> ManySteps:
    case = CASES[name]
    return ManySteps(
        f"{case.about}, {schedule}, SGD",
        case.stages,
        case.model,
        lambda count: [case.batch()] * count,
        lambda: {
            "microbatches": case.microbatches,
            "balance": [1] * case.stages,
            "schedule": schedule,
            "checkpoint": "never",
            "loss_fn": loss_fn,
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        },
    )


def _charlm() -> ManySteps:
    job = example_job("charlm")
    example, table, training = load_example("charlm"), job["pipeline"], job["training"]
    torch.manual_seed(training["seed"])
    workload = example.build(**job["job"]["parameters"])

    def batches(count: int) -> list[tuple[Any, Any]]:
        source = iter(workload.batches(training["batch_size"], Generator().manual_seed(training["seed"])))
        return [next(source) for _ in range(count)]

    return ManySteps(
        "the job of examples/charlm, AdamW without clipping",
        len(table["devices"]),
        lambda: workload.model,
        batches,
        lambda: {
            **{name: table[name] for name in ("microbatches", "schedule", "checkpoint")},
            "loss_fn": workload.loss_fn,
            "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
        },
    )


MANY_STEPS: dict[str, Callable[[], ManySteps]] = {
    "fine": partial(_plain, "fine", "1f1b"),
    "broad": partial(_plain, "broad", "1f1b"),
    "broad-zb-h2": partial(_plain, "broad", "zb-h2"),
    "charlm": _charlm,
}


def run(progress: Progress, *, steps: int = 50, repeats: int = 3, cases: str | None = None) -> Figures:
    """For each case, the medians over ``repeats`` turns of ``steps`` steps; a shorter turn of each way warms up.

    ``least_seconds`` is the step's time in the fastest turn. Raises ``OptionError`` for an unknown case, and outside a
    checkout for one that is an example.
    """
    chosen = _chosen_cases(cases)
    found = run_on_loop(_measured(progress, steps, repeats, list(chosen.values())))
    rows = [{"case": f"{name}, {way}", **row[way]} for name, row in zip(chosen, found, strict=True) for way in WAYS]
    told = [{"case": name, "is": case.about} for name, case in chosen.items()]
    return {"steps": steps, "repeats": repeats, "rows": rows, "cases": told}


async def _measured(progress: Progress, steps: int, repeats: int, cases: Sequence[ManySteps]) -> list[Figures]:
    found = []
    for case in cases:
        names = [f"cpu:{index}" for index in range(case.devices)]
        model, options = case.make(), case.options()
        clipped = Pipeline(deepcopy(model), names, clip_grad_norm=1.0, **options)
        async with Pipeline(model, names, **options) as pipe, clipped:
            pipes = dict(zip(WAYS, (pipe, pipe, clipped), strict=True))
            batches = case.batches(steps)
            for way in WAYS:
                await _turn(pipes[way], way, batches[:3])
            rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for number in rounds(repeats, progress, f"{steps} steps of {case.about}, turn"):
                for way in alternating(WAYS, number):
                    rows[way].append(await _turn(pipes[way], way, batches))
        found.append({way: _summary(rows[way]) for way in WAYS})
    return found


def _summary(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    # The least as well: while something else takes a core for seconds, all devices share the other one.
    return {**medians(rows), "least_seconds": min(row["step_seconds"] for row in rows)}


async def _turn(pipe: Pipeline, way: str, batches: list[tuple[Any, Any]]) -> dict[str, float]:
    start = time.perf_counter()
    if way == "step":
        results = [await pipe.step(x, target, return_outputs=False) for x, target in batches]
    else:
        results = [result async for result in pipe.steps(batches, return_outputs=False)]
    seconds = time.perf_counter() - start
    idle, borders = devices_idle([result.record for result in results])
    first, last = pipe.devices[0].name, pipe.devices[-1].name
    return {
        "step_seconds": seconds / len(batches),
        "first_idle_share": idle[first],
        "last_idle_share": idle[last],
        "first_border_seconds": borders[first],
        "last_border_seconds": borders[last],
    }


def devices_idle(records: Sequence[StepRecord]) -> tuple[dict[str, float], dict[str, float]]:
    """Of each device: the idle share over all steps, and the mean seconds without a task between one and the next."""
    found = reports(records)
    busy = dict.fromkeys(found[0].device_busy, 0.0)
    spans: dict[str, list[tuple[float, float]]] = {device: [] for device in busy}
    for each in found:
        for device, seconds in each.device_busy.items():
            busy[device] += seconds
            times = [at for at in each.tasks if at.task.lane.device == device and at.task.lane.queue is Queue.COMPUTE]
            spans[device].append((min(at.start for at in times), max(at.end for at in times)))
    begun = min(span[0][0] for span in spans.values())
    whole = max(span[-1][1] for span in spans.values()) - begun
    borders = {
        device: fmean([after[0] - before[1] for before, after in pairwise(span)] or [0.0])
        for device, span in spans.items()
    }
    return {device: 1 - seconds / whole for device, seconds in busy.items()}, borders


show = markdown(
    rows="{steps} steps in a row, medians of {repeats} turns; the idle shares of the first and the last device, and "
    "how long they are idle at the border of two steps:",
    cases="Cases:",
)


def _chosen_cases(names: str | None) -> dict[str, ManySteps]:
    """The cases with these ``names``, separated by commas; by default all."""
    wanted = list(MANY_STEPS) if names is None else [name.strip() for name in names.split(",")]
    for name in wanted:
        check_choice("case", name, tuple(MANY_STEPS))
    return {name: MANY_STEPS[name]() for name in wanted}
