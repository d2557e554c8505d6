"""Chrome traces of steps, for https://ui.perfetto.dev: a fold over their journals, real or simulated.

::

    steps       step          │ step 6 ─────────────────────────────│ step 7 ───
    cpu:0       compute       │ F(0,0) │ F(1,0) │         │ B(0,0) │    a process for each device, a thread for each
                grad-in                          │ C(0,1>0)               of its lanes, and counters
                stage 0 …     ▁▁▁▁▁▁▁▁▁▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▁▁
    cpu:1       compute                │ F(0,1) │ B(0,1)
    cpu memory  memory …      ▁▁▂▂▂▂▂▂▃▃▃▃▃▃▃▃▄▄▄▄▄▃▃▃▃▃▂▂▂▂            what the process holds of a physical device

The arguments of a task say what it waited for, and for how long its lane was idle, by reason. Where the pipeline has
replicas, devices are called after theirs, too.
Where the devices are in workers, the processes are these, and their threads the devices with their lanes.
Steps are on the clock of their journals, which begins at 0 here. Steps that overlap have rows of their own, and a mark
on each device shows where it begins the later one. Times are microseconds, to the nanosecond. A trace of
CUDA devices costs them nothing more: the journal has the times of events that were recorded on the lane's stream, read
when the device was done, and converted to the host's clock (``ops/device/streams.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from asyncpipe.core.engine.events import Outcome, StepCompleted, StepSubmitted, TaskFailed
from asyncpipe.core.graph.task import Lane, Queue, Task
from asyncpipe.core.graph.task_graph import Phase
from asyncpipe.core.predict.idle_reasons import waits
from asyncpipe.core.predict.memory import StageMemory
from asyncpipe.core.predict.report import Report, report
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.observe.pictures.trace_counters import in_flight, measured_memory, predicted_memory
from asyncpipe.observe.pictures.trace_tracks import TraceEvent, TraceTracks

__all__ = ["to_chrome", "write_trace"]

STEP_COLOURS = {Outcome.OK: "white", Outcome.FAILED: "terrible", Outcome.CANCELLED: "bad"}


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
    results = [report(record) for record in kept]
    tracks = TraceTracks(kept, results, unit)
    events: list[TraceEvent] = []
    for record, result, place in zip(kept, results, tracks.steps, strict=True):
        events.append(_step(record, result, place))
        events += _slices(record, result, tracks)
        events += _failures(record, tracks)
        events += _borders(record, result, tracks)
        events += _taken(result, tracks)
    events += in_flight(kept, results, tracks)
    events += measured_memory(kept, tracks)
    if memory is not None:
        events += predicted_memory(kept, memory, tracks)
    events.sort(key=lambda event: float(event["ts"]))
    return {"traceEvents": [*tracks.metadata(), *events], "displayTimeUnit": "ms"}


# Steps


def _step(record: StepRecord, result: Report, place: TraceEvent) -> TraceEvent:
    """The slice of a whole step, from its submission to the end of its last task."""
    return {
        "ph": "X",
        "name": _step_name(record),
        "cat": "step",
        "cname": STEP_COLOURS[record.outcome],
        "args": _step_arguments(record, result),
        **place,
    }


def _step_name(record: StepRecord) -> str:
    phase = "" if record.graph.phase is Phase.STEP else f" {record.graph.phase.value}"
    outcome = "" if record.outcome is Outcome.OK else f" {record.outcome.value}"
    return f"step {record.step}{phase}{outcome}"


def _step_arguments(record: StepRecord, result: Report) -> TraceEvent:
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
        arguments["bubble_ratio"] = round(result.bubble_ratio, 4)
    for _, event in record.journal:
        if isinstance(event, StepCompleted) and event.error is not None:
            failed = "" if event.failed_task is None else f"{graph.tasks[event.failed_task].id}: "
            arguments["error"] = f"{failed}{type(event.error).__name__}"
    return arguments


# Tasks


def _taken(result: Report, tracks: TraceTracks) -> Iterator[TraceEvent]:
    """Slices where another job had a device, and the step computed nothing there."""
    for device, spans in result.taken.items():
        for start, end in spans:
            span = tracks.span(start + result.origin, end + result.origin)
            place = {**tracks.lane(Lane(device, Queue.COMPUTE)), **span}
            yield {"ph": "X", "name": "another job", "cat": "shared", "cname": "grey", **place, "args": {}}


def _slices(record: StepRecord, result: Report, tracks: TraceTracks) -> Iterator[TraceEvent]:
    """The slice of every completed task."""
    waited = waits(record, result)
    for time in result.tasks:
        task, wait = time.task, waited[time.task.number]
        idle = {f"{reason.value}_us": tracks.span(0.0, seconds)["dur"] for reason, seconds in wait.idle.items()}
        yield {
            "ph": "X",
            "name": task.id,
            "cat": task.kind.name.lower(),
            "cname": task.kind.trace_colour,
            **tracks.lane(task.lane),
            **tracks.span(time.start + result.origin, time.end + result.origin),
            "args": {
                **_arguments(record, task),
                **({"waited_for": wait.name} if wait.name else {}),
                **{name: length for name, length in idle.items() if length},
            },
        }


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
    if len(rows := record.graph.rows) > 1:
        arguments["replica"] = rows.stage_row(task.stage)
    if task.bucket is not None:
        arguments["bucket"] = task.bucket
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


def _borders(record: StepRecord, result: Report, tracks: TraceTracks) -> Iterator[TraceEvent]:
    """A mark on each device where it begins a step that was submitted behind another one."""
    if not any(isinstance(event, StepSubmitted) and event.after is not None for _, event in record.journal):
        return
    firsts = {time.task.lane: time.start for time in reversed(result.tasks) if time.task.lane.queue is Queue.COMPUTE}
    for lane, start in firsts.items():
        name, place = f"{_step_name(record)} begins", tracks.lane(lane)
        yield {"ph": "i", "s": "t", "name": name, **place, "ts": tracks.at(start + result.origin)}
