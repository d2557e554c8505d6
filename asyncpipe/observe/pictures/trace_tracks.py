"""Where and when the events of a Chrome trace are: processes, threads, and the time scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from asyncpipe.core.engine.events import StepRecord, TaskCompleted
from asyncpipe.core.graph.task import Lane

__all__ = ["TraceClock", "TraceEvent", "TraceTracks"]

TraceEvent = dict[str, Any]
"""One event of a trace, or a part of one, ready for ``json.dumps``."""


class TraceClock:
    """Converts times of journals into microseconds since the earliest of them, to the nanosecond.

    ``unit`` is how many seconds a unit of the journals' time stands for.
    """

    def __init__(self, records: Sequence[StepRecord], unit: float = 1.0) -> None:
        self._origin = min((at for record in records for at in _starts(record)), default=0.0)
        self._scale = unit * 1e6

    def at(self, time: float) -> float:
        """``time`` in microseconds."""
        return round((time - self._origin) * self._scale, 3)


def _starts(record: StepRecord) -> Iterator[float]:
    """The submission of the step and the starts of its tasks, which a device's clock may put before it."""
    if record.journal:
        yield record.journal[0][0]
    for _, event in record.journal:
        if isinstance(event, TaskCompleted):
            yield event.started


class TraceTracks:
    """The numbers of processes (``pid``) and threads (``tid``) in a trace.

    There is a process for each logical device, for each physical device with measured memory (unless a logical device
    has its name), and for the steps, which are shown on top. Threads are numbered from 1, because viewers treat 0
    specially, and through all processes, because some viewers expect unique numbers. Processes have the numbers after
    those of the threads, because Perfetto takes a thread with its process's number for the main thread.
    """

    def __init__(self, records: Sequence[StepRecord], rows: int, memories: Iterable[str]) -> None:
        """``rows`` of steps, which are side by side where steps overlap; ``memories`` are names of physical devices."""
        lanes = dict.fromkeys(lane for record in records for lane in record.graph.lanes)
        self._lanes = {lane: tid for tid, lane in enumerate(lanes, 1)}
        self._rows = range(len(lanes) + 1, len(lanes) + 1 + rows)
        names = dict.fromkeys([*(lane.device for lane in lanes), *memories])
        self._devices = {name: pid for pid, name in enumerate(names, self._rows.stop + 1)}
        self._memories = names.keys() - {lane.device for lane in lanes}

    def device(self, device: str) -> TraceEvent:
        """The place of the counters of a device, logical or physical."""
        return {"pid": self._devices[device]}

    def lane(self, lane: Lane) -> TraceEvent:
        """The place of the tasks of a lane."""
        return {**self.device(lane.device), "tid": self._lanes[lane]}

    def step(self, row: int) -> TraceEvent:
        """The place of the steps of a row, counted from 0."""
        return {"pid": self._rows.stop, "tid": self._rows[row]}

    def metadata(self) -> Iterator[TraceEvent]:
        """The events that name processes and threads and put them in order."""
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
