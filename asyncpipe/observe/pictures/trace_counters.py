"""The counters of a Chrome trace: micro-batches in flight per stage, and memory per device.

Memory is measured, per physical device, or predicted by ``core/predict/memory.py``, per logical device. Both are
counters of bytes. Perfetto labels a counter by its name and the key of its value::

    measured    notes.samples, after each task         ┐
                notes.memory, at the end of a step     ├──▶  {"ph": "C", "name": "memory", "args": {"bytes": …}}
    predicted   memory_over_time, from stages' sizes   ┘     (a prediction is called "predicted memory")
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncpipe.core.engine.events import Outcome, StepRecord, TaskCompleted
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.memory import StageMemory, memory_over_time
from asyncpipe.observe.pictures.trace_tracks import TraceClock, TraceEvent, TraceTracks

__all__ = ["in_flight", "measured_memory", "predicted_memory", "sampled_devices"]

_MemorySample = tuple[float, str, int]
"""(time of the journal, device, bytes)"""


def in_flight(records: Sequence[StepRecord], tracks: TraceTracks, clock: TraceClock) -> Iterator[TraceEvent]:
    """Per stage, how many micro-batches are between the start of their forward and the end of their backward."""
    changes: list[tuple[float, int, int, str]] = []
    for record in records:
        changes += _changes(record)
    live: dict[tuple[int, str], list[tuple[float, int]]] = {}
    for at, change, stage, device in sorted(changes):
        row = live.setdefault((stage, device), [])
        row.append((at, (row[-1][1] if row else 0) + change))
    for (stage, device), row in live.items():
        yield from _counter(f"stage {stage}", "micro-batches in flight", tracks.device(device), row, clock)


def _changes(record: StepRecord) -> Iterator[tuple[float, int, int, str]]:
    """(time, +1 or -1, stage, device) of each micro-batch that a stage begins or ceases to hold.

    When sorted, ends come before starts of the same time. What a failed step still holds ends with the step.
    """
    graph = record.graph
    held: set[tuple[int, int]] = set()
    for _, event in record.journal:
        if isinstance(event, TaskCompleted):
            task = graph.tasks[event.task]
            if task.kind is TaskKind.FORWARD:
                held.add((task.microbatch, task.stage))
                yield event.started, 1, task.stage, task.lane.device
            if task.kind in graph.releasing:
                held.discard((task.microbatch, task.stage))
                yield event.ended, -1, task.stage, task.lane.device
    if record.outcome is not Outcome.OK:
        end = record.journal[-1][0]
        for _, stage in held:
            yield end, -1, stage, graph.devices[graph.placement[stage]]


def sampled_devices(records: Sequence[StepRecord]) -> list[str]:
    """The names of the physical devices with measured memory."""
    return sorted({device for record in records for _, device, _ in _samples(record)})


def measured_memory(records: Sequence[StepRecord], tracks: TraceTracks, clock: TraceClock) -> Iterator[TraceEvent]:
    """Per physical device, the bytes allocated on it, as noted during the steps and at their ends."""
    samples = [sample for record in records for sample in _samples(record)]
    # Several threads note samples, so they are not in order.
    samples.sort(key=lambda sample: sample[0])
    return _memory("memory", samples, tracks, clock)


def _samples(record: StepRecord) -> Iterator[_MemorySample]:
    yield from record.notes.samples
    if record.journal:
        end = record.journal[-1][0]
        yield from ((end, device, memory.allocated) for device, memory in record.notes.memory.items())


def predicted_memory(
    records: Sequence[StepRecord], memory: StageMemory, tracks: TraceTracks, clock: TraceClock
) -> Iterator[TraceEvent]:
    """Per logical device, the bytes that stages of the sizes ``memory`` hold; raises as ``memory_over_time`` does."""
    samples = [
        (at, record.graph.devices[device], held)
        for record in records
        for at, device, held in memory_over_time(record, memory)
    ]
    samples.sort(key=lambda sample: sample[0])
    return _memory("predicted memory", samples, tracks, clock)


def _memory(
    name: str, samples: Sequence[_MemorySample], tracks: TraceTracks, clock: TraceClock
) -> Iterator[TraceEvent]:
    rows: dict[str, list[tuple[float, int]]] = {}
    for at, device, held in samples:
        rows.setdefault(device, []).append((at, held))
    for device, row in rows.items():
        yield from _counter(name, "bytes", tracks.device(device), row, clock)


def _counter(
    name: str, key: str, place: TraceEvent, row: Sequence[tuple[float, int]], clock: TraceClock
) -> Iterator[TraceEvent]:
    """A counter through a row of (time, value): the last value of each instant, where it differs from the one before.

    Without this, an end and a start at one instant would be a notch in the picture.
    """
    shown = None
    for at, value in {clock.at(time): value for time, value in row}.items():
        if value != shown:
            yield {"ph": "C", "name": name, **place, "ts": at, "args": {key: value}}
        shown = value
