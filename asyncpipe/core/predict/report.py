"""The report of a step: how its time was used, folded from the journal of a real or simulated step.

Steps that overlap have reports on one clock (``reports``); what they have in common is how soon one follows the other
(``steady_state``)::

    device 0  F0 F1 … W7│F0 F1 … W7│F0 …            a step by itself takes 27, and its devices are idle for 11 % of it;
    device 3  ·········F0 F1 … W7│F0 F1 … W7│F0 …   but one ends every 24, in which no device is idle
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from asyncpipe.core.engine.events import GateOpened, StepSubmitted, TaskCompleted
from asyncpipe.core.engine.lane_use import spans_taken
from asyncpipe.core.graph.task import Queue, Task
from asyncpipe.core.graph.task_graph import TaskGraph, critical_path
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.records.compilations import Compilation
from asyncpipe.core.records.step_notes import UNKNOWN_SIZE, StepSize
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.errors import OptionError

__all__ = ["Report", "SteadyState", "TaskTime", "link_waits", "peak_per_device", "report", "reports", "steady_state"]


@dataclass(frozen=True, slots=True)
class TaskTime:
    """When a task ran, in seconds from the beginning of the step (of the first one, in ``reports``)."""

    task: Task
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """The duration of the task."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Report:
    """How the time of one step was used, or of a part of one, with the devices of that part.

    Times are in seconds; ratios are between 0 and 1.
    """

    step: int
    seconds: float
    """From the beginning to the end of the last task. A step begins with its submission; one that was submitted behind
    another step begins with its first task, since until then the devices are the other's."""
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
    """For each task at a gate, when the last gate that held it opened: in a backward, when its gradient came."""
    arrived: dict[int, float]
    """For each task that waited for other workers, when the last message that it needed came. What it waits for was
    computed before; the time between is the *edge*."""
    compilations: tuple[Compilation, ...] = ()
    """What was compiled in the step, which is no part of its tasks' times."""
    taken: dict[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    """By device: when another job had it and this one computed nothing there, as (begin, end), in their order."""
    began: float = 0.0
    """When the step began, on the clock of its tasks."""
    origin: float = 0.0
    """When that clock began, on the clock of the journal."""

    size: StepSize = UNKNOWN_SIZE
    """What the step worked on."""
    stage_memory: tuple[int, ...] = ()
    """For each stage, the most bytes that the process which has it ever used of the stage's physical device, for all
    that is there; empty where that was not noted."""

    @property
    def tokens_per_second(self) -> float:
        """Padding included; 0 where the mini-batch has no tokens."""
        return self.size.tokens / self.seconds if self.seconds else 0.0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: what the model needs, as a share of what the devices could compute in that time.

        ``None`` where the pipeline was not told its ``flops``, or the ``peak_flops`` of its devices are not known.
        """
        could = self.size.peak_flops * self.seconds
        return self.size.flops / could if could and self.size.flops else None

    @property
    def end(self) -> float:
        """When the last task ended, on the clock of the tasks."""
        return self.began + self.seconds

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


@dataclass(frozen=True, slots=True)
class SteadyState:
    """How steps follow each other: they may overlap, so one may follow sooner than a step takes."""

    seconds: float
    """From the end of one step to the end of the next."""
    device_busy: dict[str, float]
    """Seconds of compute on each device in a step."""

    @property
    def device_bubble(self) -> dict[str, float]:
        """The idle share of each device."""
        seconds = self.seconds
        return {device: 1.0 - busy / seconds if seconds else 0.0 for device, busy in self.device_busy.items()}

    @property
    def bubble_ratio(self) -> float:
        """The idle share of the compute lanes, as a mean over all devices."""
        return fmean(self.device_bubble.values())


def report(record: StepRecord) -> Report:
    """What one step took: times of its tasks, idle shares and peaks, from its journal.

    Times count from the step's submission (from its first task, if it overlaps the step before), in seconds, or in the
    unit of the costs if it was simulated.
    """
    return _report(record, _began(record))


def reports(records: Sequence[StepRecord]) -> list[Report]:
    """The reports of steps on one clock, on which the first of them begins at 0; for ``steady_state``.

    ``records`` are of one pipeline or simulation, in the order of their submissions. Without any, the list is empty.
    """
    origin = _began(records[0]) if records else 0.0
    return [_report(record, origin) for record in records]


def steady_state(steps: Sequence[Report]) -> SteadyState:
    """How steps of one job follow each other, as means from the end of the first to the end of the last.

    ``steps`` are the ``reports`` of two or more steps, without those in which the pipeline had yet to fill.
    Times have the unit of theirs. Raises ``OptionError`` if there are fewer than two.
    """
    if len(steps) < 2:
        raise OptionError(f"a steady state shows in two steps or more, got {len(steps)}")
    ends = [each.end for each in steps]
    return SteadyState(
        seconds=(ends[-1] - ends[0]) / (len(steps) - 1),
        device_busy={device: fmean(each.device_busy[device] for each in steps[1:]) for device in steps[0].device_busy},
    )


def _began(record: StepRecord) -> float:
    at, submitted = next(((at, event) for at, event in record.journal if isinstance(event, StepSubmitted)), (0.0, None))
    if submitted is None or submitted.after is None:
        return at
    return min((event.started for _, event in record.journal if isinstance(event, TaskCompleted)), default=at)


def _report(record: StepRecord, origin: float) -> Report:
    graph, began = record.graph, _began(record) - origin
    times = [
        TaskTime(graph.tasks[event.task], event.started - origin, event.ended - origin)
        for _, event in record.journal
        if isinstance(event, TaskCompleted)
    ]
    device_busy = dict.fromkeys(graph.own_devices, 0.0)
    stage_busy = [0.0] * graph.shape.stages
    seconds = {time.task.number: time.seconds for time in times}
    for time in times:
        if time.task.lane.queue is Queue.COMPUTE:
            device_busy[time.task.lane.device] += time.seconds
            stage_busy[time.task.stage] += time.seconds
    return Report(
        step=record.step,
        seconds=max((time.end - began for time in times), default=0.0),
        tasks=tuple(sorted(times, key=lambda time: (time.start, time.task.number))),
        device_busy=device_busy,
        stage_busy=tuple(stage_busy),
        peak_in_flight=_peaks(times, range(graph.shape.stages), graph.releasing),
        critical_path=critical_path(graph, lambda task: seconds.get(task.number, 0.0)),
        gates_opened={
            graph.gates[event.gate]: at - origin for at, event in record.journal if isinstance(event, GateOpened)
        },
        arrived={task: at - origin for task, at in record.notes.arrived.items()},
        compilations=tuple(record.notes.compilations),
        taken=_taken(record, origin, times),
        size=record.notes.size,
        stage_memory=_stage_memory(record),
        began=began,
        origin=origin,
    )


def _stage_memory(record: StepRecord) -> tuple[int, ...]:
    graph, memory = record.graph, record.notes.memory
    names = [graph.devices[place].partition("#")[0] for place in graph.placement]
    # All CPU devices of a process are one.
    held = [memory.get(name) or (memory.get("cpu") if "cpu" in name else None) for name in names]
    return tuple(each.peak for each in held if each is not None) if all(held) else ()


def _taken(record: StepRecord, origin: float, times: Sequence[TaskTime]) -> dict[str, tuple[tuple[float, float], ...]]:
    """When other jobs had the lanes that compute, beside the step's own tasks; times count from ``origin``."""
    spans_of: dict[str, list[tuple[float, float]]] = {}
    last = max((time.end + origin for time in times), default=0.0)
    for lane, account in record.notes.taken.items():
        if lane.queue is Queue.COMPUTE:
            free = _began(record)
            own = sorted((time.start + origin, time.end + origin) for time in times if time.task.lane == lane)
            for start, end in own:
                spans_of.setdefault(lane.device, []).extend(spans_taken(account, free, start))
                free = max(free, end)
            spans_of.setdefault(lane.device, []).extend(spans_taken(account, free, last))
    return {
        device: tuple((start - origin, end - origin) for start, end in spans)
        for device, spans in spans_of.items()
        if spans
    }


def link_waits(report: Report, graph: TaskGraph, after: Report | None = None) -> dict[str, float]:
    """By device: the seconds in which it stood still while what its next task waited for was on its way from another.

    That is from when the other device had made it until it arrived, as notes of workers, or of a simulation on a
    topology, tell. Waiting for the other device to make it does not count, nor what a device still had to do of the
    step that this one was submitted ``after``, if any.
    """
    ended = {time.task.number: time.end for time in report.tasks}
    free = dict.fromkeys(graph.own_devices, report.began)
    waits = dict.fromkeys(free, 0.0)
    for time in () if after is None else after.tasks:
        if time.task.lane.queue is Queue.COMPUTE:
            free[time.task.lane.device] = max(free[time.task.lane.device], time.end)
    for time in report.tasks:
        lane, number = time.task.lane, time.task.number
        if lane.queue is not Queue.COMPUTE:
            continue
        idle = 0.0
        for brings in (number, *graph.dependencies[number]):  # G gets messages itself, and A on another lane.
            if brings in report.arrived and graph.tasks[brings].kind is not TaskKind.REDUCE:
                since = max([free[lane.device], *(ended[maker] for maker in graph.read_by(brings))])
                idle = max(idle, min(time.start, report.arrived[brings]) - since)
        waits[lane.device] += idle
        free[lane.device] = time.end
    return waits


def peak_per_device(report: Report, graph: TaskGraph) -> tuple[float, ...]:
    """For each device, the most micro-batches that it held at once in the step of ``report``.

    A micro-batch at one of a device's v stages counts 1/v. This measures memory comparably for schedules with different
    numbers of virtual stages.
    """
    peaks = _peaks(report.tasks, graph.placement, graph.releasing)
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
