"""Predicted memory: how many bytes each device holds, over time and at most, from a record and measured sizes.

What a micro-batch holds at a stage, over the time of the step::

                  F starts        F ends     R starts      R ends      B (or W) ends
    kept             │ saved ─────────────────────────────────────────────│
    recomputed       │ inputs ────────────────│ saved ────────────────────│

It is the same fold as the peaks of ``core/predict/report.py``, weighted with bytes, and so works for simulated steps as
well as for those that ran.

Not counted, so the prediction is a little low: what tasks need only while they run (workspace, intermediate
gradients), values and gradients that were brought to a device and wait there for their task, the batch, its outputs
and losses, replicas of tied parameters, and what an allocator loses to fragmentation. Counted too long, so it is a
little high: between I and W everything that the forward kept counts, although I needs part of it for the last time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncpipe.core.engine.events import StepRecord, StepSubmitted, TaskCompleted
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import RELEASING_KINDS, TaskKind
from asyncpipe.errors import OptionError

__all__ = ["StageMemory", "format_bytes", "memory_over_time", "peak_memory"]

_F, _R = TaskKind.FORWARD, TaskKind.RECOMPUTE


@dataclass(frozen=True, slots=True)
class StageMemory:
    """How many bytes each stage needs, as measured; one number a stage in every field, kept as tuples.

    Raises ``OptionError`` for fields of different lengths and for negative numbers.
    """

    saved: Sequence[int]
    """What the forward of one micro-batch keeps for its backward, its input included where that is kept."""
    inputs: Sequence[int]
    """The input of one micro-batch, which is all that is kept until R where the micro-batch is recomputed."""
    fixed: Sequence[int]
    """Parameters, their gradients and the optimizer's state, through the whole step."""

    def __post_init__(self) -> None:
        for name in ("saved", "inputs", "fixed"):
            row = tuple(getattr(self, name))
            if len(row) != len(self.saved):
                raise OptionError(f"{name} must have a number for each of {len(self.saved)} stages, got {list(row)}")
            if any(not number >= 0 for number in row):
                raise OptionError(f"{name} must be bytes, zero or more, got {list(row)}")
            object.__setattr__(self, name, row)


def peak_memory(record: StepRecord, memory: StageMemory) -> list[int]:
    """The most bytes that each device held at one moment of the step: what is fixed, and what micro-batches keep.

    It is the highest of ``memory_over_time``, which says what counts and what is raised.
    """
    peaks = [0] * record.graph.shape.devices
    for _, device, held in memory_over_time(record, memory):
        peaks[device] = max(peaks[device], held)
    return peaks


def memory_over_time(record: StepRecord, memory: StageMemory) -> list[tuple[float, int, int]]:
    """(time, device, bytes that it holds from then on) by time: at the step's submission, and whenever it changes.

    Times are those of the journal, devices are positions in the graph's. Which micro-batches are recomputed is read
    from the graph's R tasks. A phase alone, forwards or backwards, counts what is fixed and no more. Ends count before
    starts at the same time. Raises ``OptionError`` where ``memory`` is that of another number of stages.
    """
    graph = record.graph
    if len(memory.saved) != graph.shape.stages:
        raise OptionError(f"memory is that of {len(memory.saved)} stages, the step has {graph.shape.stages}")
    live = [0] * graph.shape.devices
    for stage, device in enumerate(graph.placement):
        live[device] += memory.fixed[stage]
    begin = next((at for at, event in record.journal if isinstance(event, StepSubmitted)), 0.0)
    found = [(begin, device, held) for device, held in enumerate(live)]
    for at, device, change in sorted(_changes(record, memory)) if graph.training else ():
        live[device] += change
        found.append((at, device, live[device]))
    return found


def _changes(record: StepRecord, memory: StageMemory) -> list[tuple[float, int, int]]:
    """(time, device, bytes more or less) of everything that a completed task changes.

    Sorted, what becomes less comes first at the same time.
    """
    graph = record.graph
    recomputed = _recomputed(graph)
    changes: list[tuple[float, int, int]] = []
    for _, event in record.journal:
        if not isinstance(event, TaskCompleted):
            continue
        _, kind, microbatch, stage, *_ = graph.tasks[event.task]
        saved, inputs = memory.saved[stage], memory.inputs[stage]
        if kind is _F:
            kept = inputs if (microbatch, stage) in recomputed else saved
            changes.append((event.started, graph.placement[stage], kept))
        elif kind is _R:
            changes.append((event.started, graph.placement[stage], saved - inputs))
        elif kind in RELEASING_KINDS:
            changes.append((event.ended, graph.placement[stage], -saved))
    return changes


def _recomputed(graph: TaskGraph) -> set[tuple[int, int]]:
    """(micro-batch, stage) of every recomputation."""
    return {(task.microbatch, task.stage) for task in graph.tasks if task.kind is _R}


def format_bytes(count: float) -> str:
    """Bytes for people: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
