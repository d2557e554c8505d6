"""Chrome traces of steps, for https://ui.perfetto.dev: a fold over their journals, real or simulated.

::

    steps       step          │ step 6 ─────────────────────────────│ step 7 ───
    cpu:0       compute       │ F(0,0) │ F(1,0) │         │ B(0,0) │    a process for each device, a thread for each
                grad-in                          │ C(0,1>0) ↗             of its lanes, and counters
                stage 0 …     ▁▁▁▁▁▁▁▁▁▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▁▁
    cpu:1       compute                │ F(0,1) │ B(0,1) ↗              arrows: producer → copy → consumer
    cpu memory  memory …      ▁▁▂▂▂▂▂▂▃▃▃▃▃▃▃▃▄▄▄▄▄▃▃▃▃▃▂▂▂▂            what the process holds of a physical device

Where the devices are in workers, the processes are these, and their threads the devices with their lanes.
Steps are on the clock of their journals, which begins at 0 here. Steps that overlap have rows of their own, and a mark
on each device shows where it begins the later one. Times are microseconds, to the nanosecond. A trace of
CUDA devices costs them nothing more: the journal has the times of events that were recorded on the lane's stream, read
when the device was done, and converted to the host's clock (``ops/device/streams.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any

from asyncpipe.core.engine.events import Outcome, StepCompleted, StepSubmitted, TaskCompleted, TaskFailed
from asyncpipe.core.graph.task import Lane, Queue, Task
from asyncpipe.core.graph.task_graph import Phase
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.memory import StageMemory
from asyncpipe.core.predict.report import report
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.observe.pictures.trace_counters import in_flight, measured_memory, predicted_memory
from asyncpipe.observe.pictures.trace_tracks import TraceEvent, TraceTracks

__all__ = ["to_chrome", "write_trace"]

STEP_COLOURS = {Outcome.OK: "white", Outcome.FAILED: "terrible", Outcome.CANCELLED: "bad"}
INSIDE = 1e-3
"""Viewers attach an arrow to the slice around its time, so it leaves a nanosecond before its slice ends."""


def write_trace(
    records: Iterable[StepRecord],
    path: str | PathLike[str],
    *,
    memory: StageMemory | None = None,
    unit: float = 1.0,
) -> None:
    """Write ``to_chrome(records, …)`` to ``path`` as JSON. Raises ``OSError`` if the file cannot be written."""
    trace = to_chrome(records, memory=memory, unit=unit)
    Path(path).write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")


def to_chrome(records: Iterable[StepRecord], *, memory: StageMemory | None = None, unit: float = 1.0) -> dict[str, Any]:
    """The steps as a trace object, ready for ``json.dump``, with events in the order of their times.

    ``memory`` are the sizes of the stages, from which the memory of simulated steps is predicted. ``unit`` is how many
    seconds a unit of the journals' time stands for. Raises ``OptionError`` if ``memory`` has another number of stages.
    """
    kept = list(records)
    tracks = TraceTracks(kept, unit)
    events = [_step(record, place) for record, place in zip(kept, tracks.steps, strict=True)]
    names = count(1)
    for record in kept:
        slices = _slices(record, tracks)
        events += slices.values()
        events += _flows(record, slices, names)
        events += _failures(record, tracks)
        events += _borders(record, slices)
        events += _taken(record, tracks)
    events += in_flight(kept, tracks)
    events += measured_memory(kept, tracks)
    if memory is not None:
        events += predicted_memory(kept, memory, tracks)
    events.sort(key=lambda event: float(event["ts"]))
    return {"traceEvents": [*tracks.metadata(), *events], "displayTimeUnit": "ms"}


# Steps


def _step(record: StepRecord, place: TraceEvent) -> TraceEvent:
    """The slice of a whole step, from its submission to the end of its last task."""
    return {
        "ph": "X",
        "name": _step_name(record),
        "cat": "step",
        "cname": STEP_COLOURS[record.outcome],
        "args": _step_arguments(record),
        **place,
    }


def _step_name(record: StepRecord) -> str:
    phase = "" if record.graph.phase is Phase.STEP else f" {record.graph.phase.value}"
    outcome = "" if record.outcome is Outcome.OK else f" {record.outcome.value}"
    return f"step {record.step}{phase}{outcome}"


def _step_arguments(record: StepRecord) -> TraceEvent:
    graph = record.graph
    arguments: TraceEvent = {
        "step": record.step,
        "outcome": record.outcome.value,
        "phase": graph.phase.value,
        "schedule": graph.schedule,
        "stages": graph.shape.stages,
        "microbatches": graph.shape.microbatches,
        "devices": graph.shape.devices,
        "tasks": len(graph.tasks),
    }
    if record.outcome is Outcome.OK:
        arguments["bubble_ratio"] = round(report(record).bubble_ratio, 4)
    for _, event in record.journal:
        if isinstance(event, StepCompleted) and event.error is not None:
            failed = "" if event.failed_task is None else f"{graph.tasks[event.failed_task].id}: "
            arguments["error"] = f"{failed}{type(event.error).__name__}"
    return arguments


# Tasks


def _taken(record: StepRecord, tracks: TraceTracks) -> Iterator[TraceEvent]:
    """Slices where another job had a device, and the step computed nothing there."""
    if not record.notes.taken:
        return
    origin = record.journal[0][0]
    found = report(record)
    for device, spans in found.taken.items():
        for start, end in spans:
            place = {**tracks.lane(Lane(device, Queue.COMPUTE)), **tracks.span(start + origin, end + origin)}
            yield {"ph": "X", "name": "another job", "cat": "shared", "cname": "grey", **place, "args": {}}


def _slices(record: StepRecord, tracks: TraceTracks) -> dict[int, TraceEvent]:
    """The slice of every completed task, by the task's number."""
    slices = {}
    edges = _edges(record, tracks)
    for _, event in record.journal:
        if isinstance(event, TaskCompleted):
            task = record.graph.tasks[event.task]
            slices[event.task] = {
                "ph": "X",
                "name": task.id,
                "cat": task.kind.name.lower(),
                "cname": task.kind.trace_colour,
                **tracks.lane(task.lane),
                **tracks.span(event.started, event.ended),
                "args": {**_arguments(record, task), **edges.get(event.task, {})},
            }
    return slices


def _edges(record: StepRecord, tracks: TraceTracks) -> dict[int, TraceEvent]:
    """For tasks that waited for other workers: how long what they need was computed and not here yet."""
    if not record.notes.arrived:
        return {}
    ended = {event.task: event.ended for _, event in record.journal if isinstance(event, TaskCompleted)}
    found = {}
    for task, arrived in record.notes.arrived.items():
        made = max(
            [record.journal[0][0], *(ended[other] for other in record.graph.dependencies[task] if other in ended)]
        )
        found[task] = {"edge_us": tracks.span(made, arrived)["dur"]}
    return found


def _arguments(record: StepRecord, task: Task) -> TraceEvent:
    arguments: TraceEvent = {
        "step": record.step,
        "microbatch": task.microbatch,
        "stage": task.stage,
        "kind": task.kind.value,
    }
    if task.source is not None:
        arguments |= {"src": task.source, "dst": task.stage}
        if task.number in record.notes.copied:
            arguments["bytes"] = record.notes.copied[task.number]
    return arguments


def _failures(record: StepRecord, tracks: TraceTracks) -> Iterator[TraceEvent]:
    """A mark on the lane of each failed task. It has no slice, because its journal does not say when it began."""
    for at, event in record.journal:
        if isinstance(event, TaskFailed):
            task = record.graph.tasks[event.task]
            yield {
                "ph": "i",
                "s": "t",
                "name": f"{task.id} failed: {type(event.error).__name__}",
                **tracks.lane(task.lane),
                "ts": tracks.at(at),
                "args": _arguments(record, task),
            }


def _borders(record: StepRecord, slices: dict[int, TraceEvent]) -> Iterator[TraceEvent]:
    """A mark on each device where it begins a step that was submitted behind another one."""
    if not any(isinstance(event, StepSubmitted) and event.after is not None for _, event in record.journal):
        return
    begun: set[Lane] = set()
    for number, place in slices.items():
        lane = record.graph.tasks[number].lane
        if lane.queue is Queue.COMPUTE and lane not in begun:
            begun.add(lane)
            name = f"{_step_name(record)} begins"
            yield {"ph": "i", "s": "t", "name": name, **{key: place[key] for key in ("pid", "tid", "ts", "args")}}


# Arrows


def _flows(record: StepRecord, slices: dict[int, TraceEvent], names: Iterator[int]) -> Iterator[TraceEvent]:
    """An arrow producer → copy → consumer for every copy that ran and every task that read its result.

    If a copy has several producers (it may bring a tied weight's summed gradients), the arrow starts at the last one.
    Slices without duration are left out, since they are invisible: a free copy of a simulation is skipped.
    """
    tasks, read_by = record.graph.tasks, record.graph.read_by
    visible = {number for number, place in slices.items() if place["dur"] > 0}
    for consumer in slices:
        for copy in read_by(consumer):
            if tasks[copy].kind is not TaskKind.COPY or copy not in slices:
                continue
            read = [number for number in read_by(copy) if number in slices]
            last = [max(read, key=lambda number: float(slices[number]["ts"] + slices[number]["dur"]))] if read else []
            ends = [slices[number] for number in (*last, copy, consumer) if number in visible]
            if len(ends) > 1:
                yield from _arrow(ends, next(names))


def _arrow(ends: Sequence[TraceEvent], name: int) -> Iterator[TraceEvent]:
    """An arrow from the end of the first slice, through those between, to the start of the last.

    ``name`` is a number, different for each arrow; Perfetto accepts no strings here.
    """
    for phase, place in zip("s" + "t" * (len(ends) - 2) + "f", ends, strict=True):
        leaves = round(max(place["ts"], place["ts"] + place["dur"] - INSIDE), 3)
        yield {
            "ph": phase,
            "id": name,
            "name": "copy",
            "cat": "copy",
            "pid": place["pid"],
            "tid": place["tid"],
            "ts": leaves if phase == "s" else place["ts"],
            **({"bp": "e"} if phase == "f" else {}),
        }
