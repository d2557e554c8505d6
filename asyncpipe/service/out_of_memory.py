"""What a device that has no memory left is told with: which stage, what it holds there, and what would help."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from asyncpipe.core.graph import TaskGraph
from asyncpipe.core.lower import CheckpointMode
from asyncpipe.core.memory import format_bytes
from asyncpipe.core.report import report
from asyncpipe.core.simulate import simulate
from asyncpipe.errors import TaskError
from asyncpipe.ops.memory import device_memory
from asyncpipe.ops.stage import Stage
from asyncpipe.pipeline import Pipeline

__all__ = ["explain_out_of_memory"]

ON_CPU = "DefaultCPUAllocator: can't allocate memory"
"""So torch's allocator for CPUs begins, whose error has no class of its own."""


def explain_out_of_memory(error: TaskError, pipe: Pipeline) -> str | None:
    """In words, what was full and what would help, if memory is what ``error`` of a step of ``pipe`` is about.

    Says only what would help this pipeline: ``checkpoint="always"`` if it recomputes less, say. Blocks for some
    milliseconds: the step is simulated, to see how many micro-batches the stage keeps.
    """
    if not _is_about_memory(error):
        return None
    stage = pipe.stages[error.stage]
    graph = pipe.graph
    kept = report(simulate(graph)).peak_in_flight[stage.index]
    memory = device_memory(stage.device.physical)
    holds = [
        f"{format_bytes(count)} of {what}"
        for what, count in (
            ("parameters", _size(stage.module.parameters())),
            ("gradients", _size(p.grad for p in stage.module.parameters() if p.grad is not None)),
            ("buffers", _size(stage.module.buffers())),
        )
        if count
    ]
    used = f"{format_bytes(memory.allocated)} of {format_bytes(memory.limit)} are in use"
    held = f"stage {stage.index} holds {', '.join([*holds, 'activations'])} of up to {kept} micro-batches at once"
    helps = "; ".join(_advice(pipe, stage, graph, kept))
    return f"no memory left on {error.device} in {error.task_id}: {used}; {held}. What would help: {helps}"


def _is_about_memory(error: TaskError) -> bool:
    link: BaseException | None = error.__cause__
    while link is not None:
        if isinstance(link, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(link, RuntimeError) and ON_CPU in str(link):
            return True
        link = link.__cause__
    return False


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _advice(pipe: Pipeline, stage: Stage, graph: TaskGraph, kept: int) -> Iterator[str]:
    """What makes less of what fills the device, the simplest first."""
    shape = graph.shape
    if pipe.checkpoint is not CheckpointMode.ALWAYS:
        yield 'checkpoint = "always", which keeps the inputs of stages in place of all activations'
    if kept > min(shape.stages - stage.index, shape.microbatches):
        yield f'schedule = "1f1b", which keeps {min(shape.stages - stage.index, shape.microbatches)} here'
    yield f"more micro-batches than {shape.microbatches}, which makes each smaller, or a smaller batch_size"
    leaves = [module for module in stage.module.modules() if not [*module.children()]]
    if shape.stages > 1 and len(leaves) > 1:
        yield f"fewer layers on stage {stage.index}, by balance"
    alone = graph.placement.count(graph.placement[stage.index]) == 1
    yield "more devices" if alone else "more devices, since this one has several stages"
