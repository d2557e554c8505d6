"""Predicted memory: how many bytes each device holds over time and at the peak, from a record and measured sizes.

The bytes that a micro-batch holds at a stage during the step::

                  F starts        F ends     R starts      R ends      B (or W) ends
    kept             │ saved ─────────────────────────────────────────────│
    recomputed       │ inputs ────────────────│ saved ────────────────────│
    offloaded        │ saved ─────┤ (freed when what waits for O begins)   ├─── saved ───│ (from the start of L)

This is the fold of the peaks in ``core/predict/report.py``, weighted with bytes; it works for simulated and real steps.

While a task runs, it also holds what its stage needs only then (``working``): intermediate values and gradients, and
for the last stage logits, their gradient, and what the loss makes of them.

The prediction is a little low, because it does not count: the workspace of kernels, copied values and gradients that
wait for their task, the batch, its outputs and losses, and fragmentation. It is a little high, because everything that
a forward kept counts until W, although I already frees a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncpipe.core.engine.events import StepSubmitted, TaskCompleted
from asyncpipe.core.kinds import COMPUTE_KINDS, RELEASING_KINDS, TaskKind
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.errors import OptionError

__all__ = ["StageMemory", "format_bytes", "memory_over_time", "peak_memory"]

_F, _R = TaskKind.FORWARD, TaskKind.RECOMPUTE


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The measured bytes of each stage; every field has one number for each stage and is kept as a tuple.

    Raises ``OptionError`` for fields of different lengths and for negative numbers.
    """

    saved: Sequence[int]
    """What the forward of one micro-batch keeps for its backward, including its input if that is kept."""
    inputs: Sequence[int]
    """The input of one micro-batch; if the micro-batch is recomputed, only this is kept until R."""
    fixed: Sequence[int]
    """Parameters, their gradients and the optimizer's state, held during the whole step."""
    working: Sequence[int] = ()
    """What a forward or backward needs at most besides, while it runs; nothing if left out."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "working", self.working or [0] * len(self.saved))
        for name in ("saved", "inputs", "fixed", "working"):
            row = tuple(getattr(self, name))
            if len(row) != len(self.saved):
                raise OptionError(f"{name} must have a number for each of {len(self.saved)} stages, got {list(row)}")
            if any(not number >= 0 for number in row):
                raise OptionError(f"{name} must be bytes, zero or more, got {list(row)}")
            object.__setattr__(self, name, row)


def peak_memory(record: StepRecord, memory: StageMemory) -> list[int]:
    """The most bytes that each device held at once: the maxima of ``memory_over_time``."""
    peaks = [0] * record.graph.shape.devices
    for _, device, held in memory_over_time(record, memory):
        peaks[device] = max(peaks[device], held)
    return peaks


def memory_over_time(record: StepRecord, memory: StageMemory) -> list[tuple[float, int, int]]:
    """(time, device, bytes that it holds from then on), ordered by time: at the step's submission and at each change.

    Times are those of the journal; devices are indices into the graph's. For a graph of forwards or backwards alone,
    only ``fixed`` counts. At equal times, ends count before starts. Raises ``OptionError`` if ``memory`` has another
    number of stages than each replica of the graph.
    """
    graph, stages = record.graph, record.graph.rows.stages
    if len(memory.saved) != stages:
        raise OptionError(f"memory is that of {len(memory.saved)} stages, the step has {stages}")
    live = [0] * graph.shape.devices
    for stage, device in enumerate(graph.placement):
        live[device] += memory.fixed[stage % stages]
    begin = next((at for at, event in record.journal if isinstance(event, StepSubmitted)), 0.0)
    found = [(begin, device, held) for device, held in enumerate(live)]
    for at, device, change in sorted(_changes(record, memory)) if graph.training else ():
        live[device] += change
        found.append((at, device, live[device]))
    return found


def _changes(record: StepRecord, memory: StageMemory) -> list[tuple[float, int, int]]:
    """(time, device, change in bytes) for each completed task that changes the memory; frees sort first."""
    graph, stages = record.graph, len(memory.saved)
    recomputed = {(task.microbatch, task.stage) for task in graph.tasks if task.kind is _R}
    frees, freed = graph.frees(), dict[tuple[int, int], float]()
    changes: list[tuple[float, int, int]] = []
    for _, event in record.journal:
        if not isinstance(event, TaskCompleted):
            continue
        _, kind, microbatch, stage, *_ = graph.tasks[event.task]
        saved, inputs = memory.saved[stage % stages], memory.inputs[stage % stages]
        if kind in COMPUTE_KINDS and (working := memory.working[stage % stages]):
            changes.append((event.started, graph.placement[stage], working))
            changes.append((event.ended, graph.placement[stage], -working))
        kept = inputs if (microbatch, stage) in recomputed else saved
        for key in frees.get(event.task, ()):
            freed[key] = min(event.started, freed.get(key, event.started))
        if kind is _F or kind is TaskKind.LOAD:
            changes.append((event.started, graph.placement[stage], kept))
        elif kind is _R:
            changes.append((event.started, graph.placement[stage], saved - inputs))
        elif kind in RELEASING_KINDS:
            changes.append((event.ended, graph.placement[stage], -saved))
    for (microbatch, stage), at in freed.items():
        held = memory.inputs if (microbatch, stage) in recomputed else memory.saved
        changes.append((at, graph.placement[stage], -held[stage % stages]))
    return changes


def format_bytes(count: float) -> str:
    """``count`` bytes in a readable unit: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
