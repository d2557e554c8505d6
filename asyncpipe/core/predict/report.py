"""The report of a step: how its time was used, folded from the journal of a real or simulated step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncpipe.core.engine.events import GateOpened, StepRecord, StepSubmitted, TaskCompleted
from asyncpipe.core.graph.task import Queue, Task
from asyncpipe.core.graph.task_graph import TaskGraph, critical_path
from asyncpipe.core.kinds import TaskKind

__all__ = ["Report", "TaskTime", "peak_per_device", "report"]


@dataclass(frozen=True, slots=True)
class TaskTime:
    """When a task ran, in seconds from the step's submission."""

    task: Task
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """The duration of the task."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Report:
    """How the time of one step was used. Times are in seconds; ratios are between 0 and 1."""

    step: int
    seconds: float
    """From submission to the end of the last task."""
    tasks: tuple[TaskTime, ...]
    """Every completed task, ordered by its start."""
    device_busy: dict[str, float]
    """Seconds of compute on each device."""
    stage_busy: tuple[float, ...]
    """Seconds of compute of each stage."""
    peak_in_flight: tuple[int, ...]
    """For each stage, the most micro-batches between the start of their forward and the end of their backward (without
    backwards, the end of their forward)."""
    critical_path: float
    """The length of the longest chain of dependent tasks."""
    gates_opened: dict[int, float]
    """For each task that waits for the caller's gradient, when the gradient arrived; empty in a whole step."""

    @property
    def device_utilization(self) -> dict[str, float]:
        """The share of the step in which each device computes."""
        return {device: self._share(busy) for device, busy in self.device_busy.items()}

    @property
    def stage_utilization(self) -> tuple[float, ...]:
        """The share of the step in which each stage computes."""
        return tuple(self._share(busy) for busy in self.stage_busy)

    @property
    def bubble_ratio(self) -> float:
        """The idle share of the compute lanes, as a mean over all devices."""
        shares = self.device_utilization.values()
        return 1.0 - sum(shares) / len(shares) if self.seconds else 0.0

    @property
    def bound(self) -> float:
        """A lower bound of the step's time: the busiest device or the critical path, whichever is longer."""
        return max([self.critical_path, *self.device_busy.values()])

    def _share(self, busy: float) -> float:
        return busy / self.seconds if self.seconds else 0.0


def report(record: StepRecord) -> Report:
    """The report of one step."""
    origin = next((at for at, event in record.journal if isinstance(event, StepSubmitted)), 0.0)
    graph = record.graph
    times = [
        TaskTime(graph.tasks[event.task], event.started - origin, event.ended - origin)
        for _, event in record.journal
        if isinstance(event, TaskCompleted)
    ]
    device_busy = dict.fromkeys(graph.devices, 0.0)
    stage_busy = [0.0] * graph.shape.stages
    seconds = {time.task.number: time.seconds for time in times}
    for time in times:
        if time.task.lane.queue is Queue.COMPUTE:
            device_busy[time.task.lane.device] += time.seconds
            stage_busy[time.task.stage] += time.seconds
    return Report(
        step=record.step,
        seconds=max((time.end for time in times), default=0.0),
        tasks=tuple(sorted(times, key=lambda time: (time.start, time.task.number))),
        device_busy=device_busy,
        stage_busy=tuple(stage_busy),
        peak_in_flight=_peaks(times, range(graph.shape.stages), graph.releasing),
        critical_path=critical_path(graph, lambda task: seconds.get(task.number, 0.0)),
        gates_opened={
            graph.gates[event.microbatch]: at - origin for at, event in record.journal if isinstance(event, GateOpened)
        },
    )


def peak_per_device(found: Report, graph: TaskGraph) -> tuple[float, ...]:
    """For each device, the most micro-batches that it held at once in the step that ``found`` reports.

    A micro-batch at one of a device's v stages counts 1/v. This measures memory comparably for schedules with different
    numbers of virtual stages.
    """
    peaks = _peaks(found.tasks, graph.placement, graph.releasing)
    return tuple(
        peaks[device] / graph.placement.count(device) if device in graph.placement else 0.0
        for device in range(graph.shape.devices)
    )


def _peaks(times: Sequence[TaskTime], places: Sequence[int], last: tuple[TaskKind, ...]) -> tuple[int, ...]:
    """The most micro-batches held at once at each place; ``places`` has the place of each stage.

    A micro-batch is held from the start of its forward to the end of its task of a kind in ``last``. At equal times,
    ends count before starts.
    """
    changes = [(time.start, 1, places[time.task.stage]) for time in times if time.task.kind is TaskKind.FORWARD]
    changes += [(time.end, -1, places[time.task.stage]) for time in times if time.task.kind in last]
    live = [0] * (max(places) + 1)
    peaks = list(live)
    for _, change, place in sorted(changes):
        live[place] += change
        peaks[place] = max(peaks[place], live[place])
    return tuple(peaks)
