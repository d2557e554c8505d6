"""Where and when the events of a Chrome trace are: processes, threads, and the time scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.core.predict.report import Report
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.records.worker_notes import WorkerNotes

__all__ = ["TraceEvent", "TraceTracks"]

TraceEvent = dict[str, Any]
"""One event of a trace, or a part of one, ready for ``json.dumps``."""


class TraceTracks:
    """The numbers of processes (``pid``) and threads (``tid``) in a trace, and its clock.

    There is a process for each logical device, or for each worker, which has the threads of all its devices. There is
    one for each physical device with measured memory (unless a logical device has its name), and for the steps, which
    are shown on top. Threads are numbered from 1, because viewers treat 0 specially, and through all processes, because
    some viewers expect unique numbers. Processes have the numbers after those of the threads, because Perfetto takes a
    thread with its process's number for the main thread.

    Times are microseconds since the earliest of the journals, to the nanosecond. ``unit`` is how many seconds a unit of
    the journals' time stands for. A worker on another clock has a label: how far that is off, and how exactly this is
    known.
    """

    def __init__(self, records: Sequence[StepRecord], results: Sequence[Report], unit: float) -> None:
        """``results`` are the reports of ``records``."""
        times = [_span(record, result) for record, result in zip(records, results, strict=True)]
        # A device's clock may put the start of a task before the submission of its step.
        starts = [result.origin + result.tasks[0].start for result in results if result.tasks]
        self._origin = min([*starts, *(begin for begin, _ in times)], default=0.0)
        self._scale = unit * 1e6
        spans = [self.span(*each) for each in times]
        rows = _rows(spans)
        lanes = dict.fromkeys(lane for record in records for lane in record.graph.lanes)
        self._lanes = {lane: tid for tid, lane in enumerate(lanes, 1)}
        self._rows = range(len(lanes) + 1, len(lanes) + 2 + max(rows, default=-1))
        logical = dict.fromkeys(lane.device for lane in lanes)
        measured = {name for record in records for name in record.notes.memory}
        measured |= {name for record in records for _, name, _ in record.notes.samples}
        self._workers = {
            device: _called(name, worker)
            for record in records
            for name, worker in record.notes.workers.items()
            for device in worker.devices
        }
        self._clocks = {
            _called(name, worker): f"clock {worker.clock_offset:+.6f} s ± {worker.clock_error * 1e6:.0f} µs"
            for record in records
            for name, worker in record.notes.workers.items()
            if worker.clock_error
        }
        own = {
            device: f"{device} (replica {number // record.graph.rows.devices})"
            for record in records
            for number, device in enumerate(record.graph.devices)
            if len(record.graph.rows) > 1
        }
        place = {device: self._workers.get(device, own.get(device, device)) for device in logical}
        place |= {device: f"{device} memory" for device in sorted(measured - logical.keys())}
        self._processes = {name: pid for pid, name in enumerate(dict.fromkeys(place.values()), self._rows.stop + 1)}
        self._devices = {device: self._processes[name] for device, name in place.items()}
        self.steps = [
            {"pid": self._rows.stop, "tid": self._rows[row], **span} for row, span in zip(rows, spans, strict=True)
        ]
        """The place and the time of each record; steps that overlap are in different rows."""

    def at(self, time: float) -> float:
        """A time of a journal in microseconds."""
        return round((time - self._origin) * self._scale, 3)

    def span(self, start: float, end: float) -> TraceEvent:
        """The time of a slice."""
        begin = self.at(start)
        return {"ts": begin, "dur": round(max(self.at(end) - begin, 0.0), 3)}

    def device(self, device: str) -> TraceEvent:
        """The place of the counters of a device, logical or physical."""
        return {"pid": self._devices[device]}

    def lane(self, lane: Lane) -> TraceEvent:
        """The place of the tasks of a lane."""
        return {**self.device(lane.device), "tid": self._lanes[lane]}

    def metadata(self) -> Iterator[TraceEvent]:
        """The events that name processes and threads and put them in order."""
        if self._rows:
            yield from _named("process", {"pid": self._rows.stop}, "steps", 1)
        for name, pid in self._processes.items():
            yield from _named("process", {"pid": pid}, name, pid)
            if (clock := self._clocks.get(name)) is not None:
                yield {"ph": "M", "name": "process_labels", "pid": pid, "args": {"labels": clock}}
        for lane, tid in self._lanes.items():
            yield from _named("thread", self.lane(lane), self._name_of(lane), tid)
        for row, tid in enumerate(self._rows, 1):
            name = "step" if len(self._rows) == 1 else f"row {row}"
            yield from _named("thread", {"pid": self._rows.stop, "tid": tid}, name, tid)

    def _name_of(self, lane: Lane) -> str:
        if lane.device not in self._workers:
            return lane.queue.value
        return lane.device if lane.queue is Queue.COMPUTE else f"{lane.device} {lane.queue.value}"


def _called(name: str, worker: WorkerNotes) -> str:
    return f"worker {name} (pid {worker.pid})"


def _span(record: StepRecord, result: Report) -> tuple[float, float]:
    """The time of a whole step, from its submission to the end of its last task."""
    begin, end = (record.journal[0][0], record.journal[-1][0]) if record.journal else (0.0, 0.0)
    return begin, max(end, result.origin + result.end)


def _rows(spans: Sequence[TraceEvent]) -> list[int]:
    """The first free row for each step. Steps overlap if devices run ahead or jobs share devices."""
    ends: list[float] = []
    rows = [0] * len(spans)
    for number in sorted(range(len(spans)), key=lambda number: float(spans[number]["ts"])):
        begin, end = spans[number]["ts"], spans[number]["ts"] + spans[number]["dur"]
        row = next((row for row, free in enumerate(ends) if free <= begin), len(ends))
        ends[row : row + 1] = [end]
        rows[number] = row
    return rows


def _named(what: str, place: TraceEvent, name: str, order: int) -> Iterator[TraceEvent]:
    yield {"ph": "M", "name": f"{what}_name", **place, "args": {"name": name}}
    yield {"ph": "M", "name": f"{what}_sort_index", **place, "args": {"sort_index": order}}
