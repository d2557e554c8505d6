"""Where and when things stand in a Chrome trace: numbers and names of processes and threads, and the scale of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from asyncpipe.core.engine.events import StepRecord, TaskCompleted
from asyncpipe.core.graph.task import Lane

__all__ = ["TraceClock", "TraceTracks", "TraceEvent"]

TraceEvent = dict[str, Any]
"""One event of a trace, ready for ``json.dumps``."""


class TraceClock:
    """Turns times of journals into microseconds since the earliest of them, to the nanosecond.

    ``unit`` is how many seconds a unit of the journals' time stands for.
    """

    def __init__(self, records: Sequence[StepRecord], unit: float = 1.0) -> None:
        self._origin = min((at for record in records for at in _starts(record)), default=0.0)
        self._scale = unit * 1e6

    def at(self, time: float) -> float:
        """``time`` in microseconds."""
        return round((time - self._origin) * self._scale, 3)


def _starts(record: StepRecord) -> Iterator[float]:
    """When the step was submitted and, since a device's clock may be a little off, when its tasks began."""
    if record.journal:
        yield record.journal[0][0]
    for _, event in record.journal:
        if isinstance(event, TaskCompleted):
            yield event.started


class TraceTracks:
    """Numbers of threads, from 1, since viewers give 0 a meaning of its own, and of processes, on from there.

    Threads are numbered through all processes: some viewers take a thread's number to be unique. No process has the
    number of a thread, which Perfetto would call its main thread. A process stands for a logical device, for a
    physical one whose memory was measured (where no logical one has its name), and for the steps, shown on top.
    """

    def __init__(self, records: Sequence[StepRecord], rows: int, memories: Iterable[str]) -> None:
        """``rows`` of steps, that lie side by side where steps overlap; ``memories`` of physical devices."""
        lanes = dict.fromkeys(lane for record in records for lane in record.graph.lanes)
        self._lanes = {lane: tid for tid, lane in enumerate(lanes, 1)}
        self._rows = range(len(lanes) + 1, len(lanes) + 1 + rows)
        names = dict.fromkeys([*(lane.device for lane in lanes), *memories])
        self._devices = {name: pid for pid, name in enumerate(names, self._rows.stop + 1)}
        self._memories = names.keys() - {lane.device for lane in lanes}

    def device(self, device: str) -> TraceEvent:
        """Where counters of a device are, logical or physical."""
        return {"pid": self._devices[device]}

    def lane(self, lane: Lane) -> TraceEvent:
        """Where the tasks of a lane are."""
        return {**self.device(lane.device), "tid": self._lanes[lane]}

    def step(self, row: int) -> TraceEvent:
        """Where the steps of a row are, counted from 0."""
        return {"pid": self._rows.stop, "tid": self._rows[row]}

    def metadata(self) -> Iterator[TraceEvent]:
        """Names of processes and threads, and the order to show them in."""
        if self._rows:
            yield from _named("process", {"pid": self._rows.stop}, "steps", 1)
        for device, pid in self._devices.items():
            name = f"{device} memory" if device in self._memories else device
            yield from _named("process", {"pid": pid}, name, pid)
        for lane, tid in self._lanes.items():
            yield from _named("thread", self.lane(lane), lane.queue.value, tid)
        for row, tid in enumerate(self._rows):
            yield from _named("thread", self.step(row), "step" if len(self._rows) == 1 else f"row {row + 1}", tid)


def _named(what: str, place: TraceEvent, name: str, order: int) -> Iterator[TraceEvent]:
    yield {"ph": "M", "name": f"{what}_name", **place, "args": {"name": name}}
    yield {"ph": "M", "name": f"{what}_sort_index", **place, "args": {"sort_index": order}}
