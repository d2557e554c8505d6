"""How many bytes of each device a job needs at its peak, measured before the job starts.

A few real steps of copies of its model show what every layer keeps for a micro-batch; a simulation of the job's own
schedule shows how many micro-batches are kept at once; AdamW's averages come on top of parameters and gradients::

    measure_job ──▶ Profile ──▶ StageMemory ─┐
    schedule ─────▶ simulate ─▶ record ──────┴─▶ peak_memory ─▶ bytes by device

``core/predict/memory.py`` says what is not counted. The measurement itself needs memory and occupies the devices for a
few steps, so it is made only for devices with a memory limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil

from asyncpipe.core.graph.lower import CheckpointMode, lower
from asyncpipe.core.graph.task_graph import Wiring
from asyncpipe.core.predict.layer_profile import ADAMW_SCALE
from asyncpipe.core.predict.memory import StageMemory, peak_memory
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.protocol import Schedule, Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.ops.model.sequential import as_sequential, split
from asyncpipe.ops.model.stage import StagedModel
from asyncpipe.service.submission.submission import stages_of
from asyncpipe.train.job_file import AUTO, Job, StagesTable, blaming_key
from asyncpipe.train.planning import choose_for, measure_job
from asyncpipe.train.workload import Workload

__all__ = ["footprint", "peaks_of"]


def footprint(job: Job, workload: Workload, *, progress: Callable[[str], None] | None = None) -> dict[str, int]:
    """The predicted peak memory of the job in bytes, by device as the job names them.

    Blocks for a few steps, on threads of its own. ``progress`` is called with messages and may raise to end the
    measurement. Raises ``JobFileError`` where the job does not fit the workload or this machine, ``TaskError`` where
    the model fails.
    """
    table = job.pipeline
    if table.schedule == AUTO:
        return _by_name(table.devices, choose_for(job, workload, progress=progress).memory)
    microbatches = _cut(job.training.batch_size, table.microbatches)
    profile = measure_job(job, workload, [microbatches], steps=1, progress=progress)
    with blaming_key(job, "pipeline"):
        schedule = find_schedule(table.schedule, order=table.order)
        balance = _balance(table, workload, schedule)
        placement = schedule.placement(Shape(len(balance), microbatches, len(table.devices)))
        memory = profile.memory(balance, microbatches, ADAMW_SCALE, placement)
        wiring = profile.wiring(balance, placement)
        peaks = peaks_of(memory, schedule, microbatches, len(table.devices), table.checkpoint, wiring)
    return _by_name(table.devices, peaks)


def peaks_of(
    memory: StageMemory,
    schedule: Schedule,
    microbatches: int,
    devices: int,
    checkpoint: CheckpointMode,
    wiring: Wiring | None = None,
) -> list[int]:
    """The peak memory of each device in bytes, when ``schedule`` runs stages that keep ``memory``."""
    shape = Shape(len(memory.saved), microbatches, devices)
    graph = lower(schedule, shape, checkpoint=checkpoint, wiring=wiring)
    return peak_memory(simulate(graph), memory)


def _balance(table: StagesTable, workload: Workload, schedule: Schedule) -> list[int]:
    """The number of layers of each stage, as the pipeline will split them."""
    if isinstance(workload.model, StagedModel):
        if table.balance != "auto":
            return list(table.balance)
        units = len(workload.model.stages)
        return workload.model.evenly(stages_of(table, schedule)) if workload.model.is_fine else [1] * units
    parts = split(as_sequential(workload.model), table.balance, stages_of(table, schedule))
    return [len(part) for part in parts]


def _cut(samples: int, microbatches: int) -> int:
    """The number of micro-batches of a batch; rounding up their size can make them fewer than requested."""
    return ceil(samples / ceil(samples / microbatches))


def _by_name(names: Sequence[str], peaks: Sequence[int]) -> dict[str, int]:
    """The sums over logical devices with the same name."""
    found: Counter[str] = Counter()
    for name, peak in zip(names, peaks, strict=True):
        found[name] += peak
    return dict(found)
