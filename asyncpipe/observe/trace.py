"""Chrome traces of steps, for https://ui.perfetto.dev: a fold over their journals.

A process stands for a device and a thread for one of its lanes; each task is a slice, and arrows lead from
what a copy reads over the copy to what reads it. Steps lie one after the other on the clock of their
journals, from 0 at the first submission. Times in a trace are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from asyncpipe.core.events import Outcome, StepRecord, StepSubmitted, TaskCompleted, TaskFailed
from asyncpipe.core.task import Lane, Task, TaskKind

__all__ = ["to_chrome", "write_trace"]

COLOURS = {
    TaskKind.FORWARD: "thread_state_runnable",
    TaskKind.RECOMPUTE: "yellow",
    TaskKind.BACKWARD: "good",
    TaskKind.INPUT_GRADIENT: "thread_state_running",
    TaskKind.WEIGHT_GRADIENT: "olive",
    TaskKind.COPY: "grey",
    TaskKind.UPDATE: "generic_work",
    TaskKind.SUM: "rail_animation",
}
"""Chrome has a list of reserved colour names and takes no others; Perfetto colours by name by itself."""
INSIDE = 1e-3
"""An arrow belongs to the slice around its time, so it leaves a nanosecond before the slice ends."""

Row = dict[str, Any]


def write_trace(records: Iterable[StepRecord], path: str | PathLike[str]) -> None:
    """Write ``to_chrome(records)`` to ``path`` as JSON."""
    Path(path).write_text(json.dumps(to_chrome(records), separators=(",", ":")), encoding="utf-8")


def to_chrome(records: Iterable[StepRecord]) -> dict[str, Any]:
    """The steps as a trace object, ready for ``json.dump``; events are in the order of their times."""
    kept = list(records)
    origin = min((_submitted(record) for record in kept), default=0.0)
    places = _Places(kept)
    events: list[Row] = []
    for number, record in enumerate(kept):
        slices = _slices(record, places, origin)
        events += slices.values()
        events += _flows(record, slices, f"{number}.")
        events += _failures(record, places, origin)
    events += _counters(kept, places, origin)
    events.sort(key=lambda event: float(event["ts"]))
    return {"traceEvents": [*places.metadata(), *events], "displayTimeUnit": "ms"}


class _Places:
    """Process and thread numbers, both from 1, since viewers give 0 a meaning of its own.

    Threads are numbered through all devices: some viewers take a thread's number to be unique.
    """

    def __init__(self, records: Sequence[StepRecord]) -> None:
        lanes = dict.fromkeys(lane for record in records for lane in record.graph.lanes)
        self._devices = {d: number for number, d in enumerate(dict.fromkeys(lane.device for lane in lanes), 1)}
        self._lanes = {lane: number for number, lane in enumerate(lanes, 1)}

    def device(self, device: str) -> dict[str, int]:
        return {"pid": self._devices[device]}

    def lane(self, lane: Lane) -> dict[str, int]:
        return {"pid": self._devices[lane.device], "tid": self._lanes[lane]}

    def metadata(self) -> Iterator[Row]:
        """Names of devices and lanes, and the order to show them in."""
        for device, number in self._devices.items():
            process = {"ph": "M", "pid": number}
            yield {**process, "name": "process_name", "args": {"name": device}}
            yield {**process, "name": "process_sort_index", "args": {"sort_index": number}}
        for lane, number in self._lanes.items():
            thread = {"ph": "M", **self.lane(lane)}
            yield {**thread, "name": "thread_name", "args": {"name": lane.queue.value}}
            yield {**thread, "name": "thread_sort_index", "args": {"sort_index": number}}


def _submitted(record: StepRecord) -> float:
    return next((at for at, event in record.journal if isinstance(event, StepSubmitted)), 0.0)


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _slices(record: StepRecord, places: _Places, origin: float) -> dict[int, Row]:
    """The slice of every completed task, by the task's number."""
    slices = {}
    for _, event in record.journal:
        if isinstance(event, TaskCompleted):
            task = record.graph.tasks[event.task]
            start = _microseconds(event.started - origin)
            slices[event.task] = {
                "ph": "X",
                "name": task.id,
                "cat": task.kind.name.lower(),
                "cname": COLOURS[task.kind],
                **places.lane(task.lane),
                "ts": start,
                "dur": max(_microseconds(event.ended - origin) - start, 0.0),
                "args": _arguments(record, task),
            }
    return slices


def _arguments(record: StepRecord, task: Task) -> Row:
    arguments: Row = {
        "step": record.step,
        "microbatch": task.microbatch,
        "stage": task.stage,
        "kind": task.kind.value,
    }
    return arguments if task.source is None else {**arguments, "src": task.source, "dst": task.stage}


def _flows(record: StepRecord, slices: dict[int, Row], prefix: str) -> Iterator[Row]:
    """An arrow producer → copy → consumer for every copy whose two ends ran."""
    dependencies = record.graph.dependencies
    for consumer in slices:
        for copy in dependencies[consumer]:
            if record.graph.tasks[copy].kind is not TaskKind.COPY or not slices.keys() >= {*dependencies[copy], copy}:
                continue
            ends = [*dependencies[copy], copy, consumer]
            for phase, place in zip("stf", (slices[end] for end in ends), strict=True):
                leaves = max(place["ts"], place["ts"] + place["dur"] - INSIDE)
                yield {
                    "ph": phase,
                    "id": f"{prefix}{copy}.{consumer}",
                    "name": "copy",
                    "cat": "copy",
                    "pid": place["pid"],
                    "tid": place["tid"],
                    "ts": leaves if phase == "s" else place["ts"],
                    **({"bp": "e"} if phase == "f" else {}),
                }


def _failures(record: StepRecord, places: _Places, origin: float) -> Iterator[Row]:
    """A mark on the lane where a task failed; it has no slice, since nobody knows how long it ran."""
    for at, event in record.journal:
        if isinstance(event, TaskFailed):
            task = record.graph.tasks[event.task]
            yield {
                "ph": "i",
                "s": "t",
                "name": f"{task.id} failed: {type(event.error).__name__}",
                **places.lane(task.lane),
                "ts": _microseconds(at - origin),
                "args": _arguments(record, task),
            }


def _counters(records: Sequence[StepRecord], places: _Places, origin: float) -> Iterator[Row]:
    """Per stage, how many micro-batches are between the start of their forward and the end of their backward."""
    changes: list[tuple[float, int, int, str]] = []
    for record in records:
        changes += _in_flight_changes(record)
    live: dict[tuple[int, str], int] = {}
    for at, change, stage, device in sorted(changes):
        live[stage, device] = live.get((stage, device), 0) + change
        yield {
            "ph": "C",
            "name": f"in flight, stage {stage}",
            **places.device(device),
            "ts": _microseconds(at - origin),
            "args": {"micro-batches": live[stage, device]},
        }


def _in_flight_changes(record: StepRecord) -> Iterator[tuple[float, int, int, str]]:
    """(time, +1 or -1, stage, device); at one instant, ends come first. What a failed step leaves ends with it."""
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
