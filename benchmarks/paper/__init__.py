"""The tables of the torchgpipe paper (Kim et al. 2020, arXiv 2004.09910) on emulated devices, row by row.

Emulated devices take the times that they are given (``models.py``), under the real scheduler, driver and threads
(``emulated.py``). So the figures show what the schedule and the runtime make of those times, and nothing about a GPU.
``figures.py`` has the paper's figures and where they are from, ``ablation.py`` what Table 1 takes out.

*Bound* is what no run of GPipe's order at these costs exceeds. In each half of the step one micro-batch passes all
stages and copies, and the other m - 1 occupy the slowest stage; other micro-batches, copies and the host cost nothing::

    seconds ≥ path(F, C) + (m-1) · max F  +  path(B, C) + (m-1) · max (R + B)

*Ratio* is ours by the bound, in seconds of a step: 1 is perfect. Every row's costs are scaled by one factor, so that
its bound takes a given real time; speeds are scaled back.

With a GPU, the paper's lines of one GPU are measured there as well, with the real U-Net (the benchmark ``unet``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import run_on_loop, table
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.report import report
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.gpipe import GPipeSchedule
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.errors import OptionError
from asyncpipe.observe.pictures.svg import svg_timeline
from asyncpipe.ops.device.devices import resolve_devices
from benchmarks.paper.ablation import without_dependency, without_streams
from benchmarks.paper.emulated import run_steps
from benchmarks.paper.figures import (
    ABLATION,
    AMOEBANET,
    AMOEBANET_SPEED,
    BARE_UNET,
    SEQUENTIAL_AMOEBANET,
    UNET,
    UNET_SPEED,
    WHOLE,
    AblationArm,
    Setting,
)
from benchmarks.paper.models import FORWARDS, LayeredModel, SplitModel, paper_model
from benchmarks.unet import speed

__all__ = ["PaperSize", "bound", "run", "show"]

RUN = "on emulated devices, in real time: real scheduler, driver and threads, and tasks of given lengths"


@dataclass(frozen=True, slots=True)
class PaperSize:
    """How long and how often the steps are run."""

    seconds: float = 1.0
    """The real time that the bound of a row takes."""
    steps: int = 3
    """Steps of a row, after one that warms up; the median counts."""


class _Run(NamedTuple):
    """A row's run."""

    seconds: float
    """The median step, in seconds of the model's costs."""
    bound: float
    record: StepRecord
    """The step with the median time, in real time."""


Measure = Callable[[TaskGraph, SplitModel, float], _Run]


def run(
    progress: Progress, *, device: str | None = None, out: str | None = None, size: PaperSize | None = None
) -> Figures:
    """The rows of every table; writes the timelines of the ablation as SVG pictures into the folder ``out``.

    ``device`` is the GPU for the lines of one GPU, by default ``cuda:0`` where there is one. Raises ``OptionError``
    if it is no GPU, or if ``out`` cannot be made, before anything runs; ``DeviceError`` if it is not there.
    """
    gpu = _gpu(device)
    folder = None if out is None else _folder(out)
    measure = partial(_measure, size or PaperSize())
    unet = paper_model(UNET)
    progress("U-Net: the ablation")
    ablation, records = _ablation(unet, measure)
    pictures = [] if folder is None else _pictures(folder, records)
    progress("AmoebaNet-D: speed")
    amoebanet = _speeds(AMOEBANET_SPEED, paper_model(AMOEBANET), measure, over=SEQUENTIAL_AMOEBANET)
    progress("U-Net: speed")
    return {
        "how": RUN,
        "ablation": ablation,
        "amoebanet": amoebanet,
        "unet": _speeds(UNET_SPEED, unet, measure, over=BARE_UNET),
        "pictures": pictures,
        "gpu": None if gpu is None else speed.run(progress, resolve_devices([gpu])[0], speed.SIZES["paper"]),
        "gpu_device": gpu,
    }


def bound(model: SplitModel, microbatches: int, checkpoint: CheckpointMode) -> float:
    """The seconds below which no step of GPipe's order ends; see above."""
    forwards, backward = list(model.forward), FORWARDS[TaskKind.BACKWARD]
    recompute = FORWARDS[TaskKind.RECOMPUTE]
    recomputed = sum(checkpoint.recomputes(i, microbatches) for i in range(microbatches))
    # The first backward's recomputation, if it has one, is seen at the last stage only: others do it while they wait.
    first = recompute * forwards[-1] if recomputed == microbatches else 0.0
    again = recompute * min(recomputed, microbatches - 1) + backward * (microbatches - 1)
    copies = sum(model.copies[link] for link in model.copies if link[1] == link[0] + 1)
    path = sum(forwards) + copies
    return path + (microbatches - 1) * max(forwards) + first + sum(forwards) * backward + copies + again * max(forwards)


# The tables


def _ablation(unet: LayeredModel, measure: Measure) -> tuple[list[Figures], dict[str, StepRecord]]:
    """The rows of Table 1; the bound of all is that of the whole one."""
    setting, rows, records = WHOLE, [], {}
    least = bound(_split(unet, setting), setting.microbatches, CheckpointMode(setting.checkpoint))
    for arm in ABLATION:
        model = _split(unet, setting, portals=arm.portals)
        found = measure(_ablated(setting, model, arm), model, least)
        records[arm.name] = found.record
        rows.append(
            {
                "name": arm.name,
                "paper_per_second": arm.paper,
                "paper_utilization": arm.utilization,
                "bound_per_second": setting.batch / least,
                "ours_per_second": setting.batch / found.seconds,
                "ours_utilization": _utilization(found.record),
                "ratio": found.seconds / least,
            }
        )
    return rows, records


def _speeds(settings: tuple[Setting, ...], layers: LayeredModel, measure: Measure, *, over: float) -> list[Figures]:
    """Rows with speed-ups over ``over`` samples per second."""
    rows: list[Figures] = []
    for setting in settings:
        model, checkpoint = _split(layers, setting), CheckpointMode(setting.checkpoint)
        least = bound(model, setting.microbatches, checkpoint)
        found = measure(_graph(setting, model), model, least)
        speeds = {"paper": setting.paper, "bound": setting.batch / least, "ours": setting.batch / found.seconds}
        rows.append(
            {
                "name": setting.name,
                "devices": setting.devices,
                "microbatches": setting.microbatches,
                **{f"{whose}_per_second": speed for whose, speed in speeds.items()},
                **{f"{whose}_speedup": speed / over for whose, speed in speeds.items()},
                "ratio": found.seconds / least,
            }
        )
    return rows


def _split(layers: LayeredModel, setting: Setting, *, portals: bool = True) -> SplitModel:
    return layers.split(setting.devices, setting.batch / setting.microbatches, portals=portals)


def _graph(setting: Setting, model: SplitModel) -> TaskGraph:
    return lower(
        GPipeSchedule(),
        Shape(setting.devices, setting.microbatches, setting.devices),
        devices=[f"emulated:{device}" for device in range(setting.devices)],
        checkpoint=CheckpointMode(setting.checkpoint),
        wiring=model.wiring,
    )


def _ablated(setting: Setting, model: SplitModel, arm: AblationArm) -> TaskGraph:
    graph = _graph(setting, model)
    if not arm.dependency:
        graph = without_dependency(graph)
    return graph if arm.streams else without_streams(graph)


def _measure(size: PaperSize, graph: TaskGraph, model: SplitModel, least: float) -> _Run:
    """The median step of ``graph``, with costs scaled so that its bound, ``least``, takes the size's seconds."""
    factor = size.seconds / least
    records = run_on_loop(run_steps(graph, model.scaled(factor), 1 + size.steps))[1:]
    by_seconds = sorted(records, key=lambda record: report(record).seconds)
    chosen = by_seconds[len(by_seconds) // 2]
    return _Run(median(report(record).seconds for record in records) / factor, least, chosen)


def _utilization(record: StepRecord) -> float:
    """The share of the step in which a device computes, as a mean: copies on a compute lane do not count."""
    result = report(record)
    computed = sum(time.seconds for time in result.tasks if time.task.kind is not TaskKind.COPY)
    return computed / result.seconds / len(record.graph.devices)


# Timelines, and the GPU


def _pictures(folder: Path, records: dict[str, StepRecord]) -> list[str]:
    """Figure 7: the timelines of the ablation, on one scale. Returns the names of the files."""
    seconds = max(report(record).seconds for record in records.values())
    names = []
    for name, record in records.items():
        path = folder / f"{name.replace(', ', '-').replace(' ', '-')}.svg"
        path.write_text(svg_timeline(record, title=f"{UNET}, {name}", seconds=seconds), encoding="utf-8")
        names.append(str(path))
    return names


def _folder(out: str) -> Path:
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--out must be a folder that can be made, got {out!r}: {error.strerror}") from error
    return folder


def _gpu(device: str | None) -> str | None:
    """The GPU to measure on, if there is one; another kind of device is refused."""
    if device is None:
        return "cuda:0" if torch.cuda.is_available() else None
    found = resolve_devices([device])[0]
    if not found.is_accelerator:
        raise OptionError(f"--device must be a GPU, on which the paper's lines of one GPU are measured, got {device!r}")
    return found.name


# What is printed


def show(figures: Figures) -> str:
    """A table for each of the paper's, then the lines of one GPU."""
    first = WHOLE
    lines = [
        "The torchgpipe paper's tables (arXiv 2004.09910), measured there on Tesla P40 GPUs; here",
        f"{figures['how']}.",
        "Bounds and ratios (seconds of a step by the bound's) are those of GPipe's order at these costs.",
        "",
        f"Table 1: {UNET}, n={first.devices}, m={first.microbatches}; samples per second and utilization",
        "",
        *table([["", "paper", "bound", "ours", "ratio", "paper", "ours"], *map(_ablation_row, figures["ablation"])]),
    ]
    for name, over, key in (
        (AMOEBANET, "the paper's n=2, m=1", "amoebanet"),
        (UNET, "the bare model on one GPU", "unet"),
    ):
        head = ["", "n", "m", "paper/s", "bound/s", "ours/s", "paper", "bound", "ours", "ratio"]
        title = f"{name}: samples per second, and speed-up over {over}"
        lines += ["", title, "", *table([head, *map(_speed_row, figures[key])])]
    lines += ["", *(f"timeline: {path}" for path in figures["pictures"])]
    if figures["gpu"] is None:
        lines.append("one GPU: not measured, since torch sees no GPU (paper: pipeline-1 0.858 of the bare U-Net)")
    else:
        lines += [
            f"one GPU, {figures['gpu_device']} (paper: pipeline-1, except_last, 0.858)",
            speed.show(figures["gpu"]),
        ]
    return "\n".join(lines)


def _ablation_row(row: Figures) -> list[str]:
    return [
        row["name"],
        _stated(row["paper_per_second"], ".2f"),
        f"{row['bound_per_second']:.2f}",
        f"{row['ours_per_second']:.2f}",
        f"{row['ratio']:.3f}",
        _stated(row["paper_utilization"], ".0%"),
        f"{row['ours_utilization']:.0%}",
    ]


def _speed_row(row: Figures) -> list[str]:
    rates = [f"{row[name]:.2f}" for name in ("paper_per_second", "bound_per_second", "ours_per_second")]
    speedups = [f"{row[name]:.3f}×" for name in ("paper_speedup", "bound_speedup", "ours_speedup")]
    return [row["name"], str(row["devices"]), str(row["microbatches"]), *rates, *speedups, f"{row['ratio']:.3f}"]


def _stated(figure: float | None, form: str) -> str:
    return "not stated" if figure is None else format(figure, form)
