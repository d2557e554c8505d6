"""The counters of a Chrome trace: micro-batches in flight per stage, and memory per device.

Memory is measured, per physical device, or predicted by ``core/predict/memory.py``, per logical device. Both are
counters of bytes. Perfetto labels a counter by its name and the key of its value::

    measured    notes.samples, after each task         ┐
                notes.memory, at the end of a step     ├──▶  {"ph": "C", "name": "memory", "args": {"bytes": …}}
    predicted   memory_over_time, from stages' sizes   ┘     (a prediction is called "predicted memory")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

from asyncpipe.core.engine.events import Outcome
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.memory import StageMemory, memory_over_time
from asyncpipe.core.predict.report import Report
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.observe.pictures.trace_tracks import TraceEvent, TraceTracks

__all__ = ["in_flight", "measured_memory", "predicted_memory"]

_Sample = tuple[float, str, str, int]
"""(time of the journal, name of the counter, device, value)"""


def in_flight(records: Sequence[StepRecord], results: Sequence[Report], tracks: TraceTracks) -> Iterator[TraceEvent]:
    """Per stage, how many micro-batches are between the start of their forward and the end of their backward."""
    live: Counter[tuple[int, str]] = Counter()
    samples: list[_Sample] = []
    found = zip(records, results, strict=True)
    for at, change, stage, device in sorted(change for record, result in found for change in _changes(record, result)):
        live[stage, device] += change
        samples.append((at, f"stage {stage}", device, live[stage, device]))
    return _counters(samples, "micro-batches in flight", tracks)


def _changes(record: StepRecord, result: Report) -> Iterator[tuple[float, int, int, str]]:
    """(time, change, stage, device): how many micro-batches a stage begins or ceases to hold.

    When sorted, ends come before starts of the same time. What a failed step still holds ends with the step.
    """
    graph = record.graph
    held: Counter[int] = Counter()
    for time in result.tasks:
        task = time.task
        if task.kind is TaskKind.FORWARD:
            held[task.stage] += 1
            yield time.start + result.origin, 1, task.stage, task.lane.device
        if task.kind in graph.releasing:
            held[task.stage] -= 1
            yield time.end + result.origin, -1, task.stage, task.lane.device
    if record.outcome is not Outcome.OK:
        end = record.journal[-1][0]
        for stage, count in held.items():
            yield end, -count, stage, graph.devices[graph.placement[stage]]


def measured_memory(records: Sequence[StepRecord], tracks: TraceTracks) -> Iterator[TraceEvent]:
    """Per physical device, the bytes allocated on it, as noted during the steps and at their ends."""
    samples: list[_Sample] = []
    for record in records:
        samples += [(at, "memory", device, held) for at, device, held in record.notes.samples]
        for device, memory in record.notes.memory.items():
            samples.append((record.journal[-1][0], "memory", device, memory.allocated))
    # Several threads note samples, so they are not in order.
    return _counters(sorted(samples, key=itemgetter(0)), "bytes", tracks)


def predicted_memory(records: Sequence[StepRecord], memory: StageMemory, tracks: TraceTracks) -> Iterator[TraceEvent]:
    """Per logical device, the bytes that stages of the sizes ``memory`` hold; raises as ``memory_over_time`` does.

    The steps are of one job, so a device is done with one when it begins the next.
    """
    samples: list[_Sample] = []
    for record in records:
        held = memory_over_time(record, memory)
        # What a device holds at a later step's submission is what the step before makes of it.
        told = held[record.graph.shape.devices :] if samples else held
        samples += [(at, "predicted memory", record.graph.devices[device], size) for at, device, size in told]
    return _counters(sorted(samples, key=itemgetter(0)), "bytes", tracks)


def _counters(samples: Iterable[_Sample], key: str, tracks: TraceTracks) -> Iterator[TraceEvent]:
    """Counters through ``samples`` in the order of their times: the last value of each instant, where it is new.

    Without this, an end and a start at one instant would be a notch in the picture.
    """
    rows: dict[tuple[str, str], dict[float, int]] = {}
    for at, name, device, value in samples:
        rows.setdefault((name, device), {})[tracks.at(at)] = value
    for (name, device), row in rows.items():
        shown = None
        for instant, value in row.items():
            if value != shown:
                yield {"ph": "C", "name": name, **tracks.device(device), "ts": instant, "args": {key: value}}
            shown = value
