"""The message for a device that has no memory left: which stage, what it holds, and what would help."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.memory import StageMemory, format_bytes, memory_over_time
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import ScheduleError, TaskError
from asyncpipe.ops.device.memory import device_memory
from asyncpipe.ops.model.stage import Stage
from asyncpipe.pipeline.pipeline import Pipeline

__all__ = ["explain_out_of_memory"]

ON_CPU = "DefaultCPUAllocator: can't allocate memory"
"""torch's CPU allocator on Linux, which raises a plain ``RuntimeError``."""
ON_CPU_ELSEWHERE = "DefaultCPUAllocator: not enough memory"
"""The same on other systems."""
SAVED, INPUT = 1000, 1
"""Nominal bytes of a micro-batch's activations and of its input; they only serve to compare two ways to run a step."""


def explain_out_of_memory(error: TaskError, pipe: Pipeline) -> str | None:
    """What was full and what would help, if ``error`` of a training step is about memory; else ``None``.

    Advice is given only if it helps this pipeline: the step is simulated with and without it, and the memory that
    micro-batches keep on the device is compared. Blocks for milliseconds, or for seconds if a step has 100,000 tasks.
    """
    if not _is_about_memory(error):
        return None
    stage = pipe.stages[error.stage]
    graph = pipe.graph
    kept = report(simulate(graph)).peak_in_flight[stage.index]
    holds = [f"{format_bytes(count)} of {what}" for what, count in _fixed(pipe, stage) if count]
    most = "1 micro-batch" if kept == 1 else f"up to {kept} micro-batches at once"
    held = f"stage {stage.index} holds {', '.join([*holds, 'activations'])} of {most}"
    helps = "; ".join(_advice(error, pipe, stage, graph))
    return f"no memory left on {error.device} in {error.task_id}: {_used(stage)}{held}. What would help: {helps}"


def _used(stage: Stage) -> str:
    if stage.device.is_elsewhere:
        return ""  # Only its worker knows, and may be gone.
    memory = device_memory(stage.device.physical)
    return f"{format_bytes(memory.allocated)} of {format_bytes(memory.limit)} are in use; "


def _is_about_memory(error: TaskError) -> bool:
    link: BaseException | None = error.__cause__
    while link is not None:
        if isinstance(link, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(link, RuntimeError) and (ON_CPU in str(link) or ON_CPU_ELSEWHERE in str(link)):
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


def _fixed(pipe: Pipeline, stage: Stage) -> Iterator[tuple[str, int]]:
    """What a stage holds during the whole step, and its bytes; an optimizer only if it belongs to the pipeline."""
    parameters = list(stage.module.parameters())
    yield "parameters", _size(parameters)
    # The gradients of the failed step are freed already; they had the sizes of the trained parameters.
    yield "gradients", _size(p for p in parameters if p.requires_grad)
    yield "buffers", _size(stage.module.buffers())
    if not stage.device.is_elsewhere and (optimizer := pipe.optimizers.get(stage.index % _row(pipe))):
        states = (value for state in optimizer.state.values() for value in state.values())
        here = stage.device.physical.type
        yield "optimizer state", _size(v for v in states if isinstance(v, Tensor) and v.device.type == here)


def _row(pipe: Pipeline) -> int:
    """How many stages a replica has. Each has an optimizer like that of the first one."""
    return len(pipe.stages) // pipe.graph.wiring.rows


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _advice(error: TaskError, pipe: Pipeline, stage: Stage, graph: TaskGraph) -> Iterator[str]:
    """What reduces the memory on the device, the simplest first."""
    physical = _physical(pipe, stage)
    here = [other for other in pipe.stages if _physical(pipe, other) == physical]
    # When a stage is updated, it holds no micro-batches any more.
    if error.kind != TaskKind.UPDATE:
        yield from _ways_to_keep_less(pipe, graph, {graph.placement[other.index] for other in here})
        yield "a smaller batch_size"
    leaves = [module for module in stage.module.modules() if not [*module.children()]]
    row = _row(pipe)
    if len({other.index % row for other in here}) < row and len(leaves) > 1:
        yield f"fewer layers on stage {stage.index % row}, by balance"
    yield f"more memory than {physical} has" + (
        "" if len(here) == 1 else f", or other devices for some of the {len(here)} stages there"
    )


def _physical(pipe: Pipeline, stage: Stage) -> torch.device:
    if stage.device.is_elsewhere:
        return next(device.physical for device in pipe.devices if device.name == stage.device.name)
    return stage.device.physical


def _ways_to_keep_less(pipe: Pipeline, graph: TaskGraph, devices: Collection[int]) -> Iterator[str]:
    """Changes with which micro-batches keep less memory on ``devices``, which are one physical device."""
    now = _most_kept(graph, devices)
    for words, schedule, checkpoint, cut in (
        (
            'checkpoint = "always", which keeps the inputs of stages in place of all activations',
            pipe.schedule,
            CheckpointMode.ALWAYS,
            1,
        ),
        ('schedule = "1f1b", which keeps fewer micro-batches at once', find_schedule("1f1b"), pipe.checkpoint, 1),
        (f"more micro-batches than {pipe.microbatches}, which makes each smaller", pipe.schedule, pipe.checkpoint, 2),
    ):
        with suppress(ScheduleError):  # The schedule does not support this shape.
            shape = replace(graph.shape, microbatches=cut * graph.shape.microbatches)
            other = lower(schedule, shape, devices=graph.devices, checkpoint=checkpoint, wiring=graph.wiring)
            if _most_kept(other, devices) < cut * now:
                yield words


def _most_kept(graph: TaskGraph, devices: Collection[int]) -> int:
    """The peak of what micro-batches keep on all of ``devices`` together, in units of ``SAVED`` and ``INPUT``."""
    stages = graph.rows.stages
    held: dict[int, int] = {}
    most = 0
    changes = memory_over_time(simulate(graph), StageMemory([SAVED] * stages, [INPUT] * stages, [0] * stages))
    for _, together in groupby(changes, key=itemgetter(0)):
        held.update({device: count for _, device, count in together})
        most = max(most, sum(held[device] for device in devices))
    return most
