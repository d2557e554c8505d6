"""What the fold of a step needs to know of its graph, as arrays: made once for a graph, used for each of its steps.

Tasks are numbered; an array maps a task's number to a position in a tuple of labels, or gathers numbers of tasks::

    kind    task ──▶ kinds     "F", "B", …              reads   task ──▶ the tasks that it depends on
    sort    task ──▶ sorts     (stage, kind)            fed     the tasks that read copies
    place   task ──▶ places    (stage, device)          compute device ──▶ its compute tasks
    device  task ──▶ devices                            copies  the copies, with their route ──▶ routes (src, dst)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from asyncpipe.core.graph.task import Queue, Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.errors import AsyncpipeError

__all__ = ["Floats", "Numbers", "Plan", "Plans", "Segments", "summed"]

Floats = NDArray[np.float64]
Numbers = NDArray[np.intp]

MOST_SIMULATED = 50_000
"""Tasks of the largest graph whose ideal bubble is told."""

_Label = TypeVar("_Label", bound=Hashable)


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Rows of different lengths, none of them empty, laid out one after the other."""

    members: Numbers
    starts: Numbers

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]], empty: int) -> Segments:
        """``rows`` laid out; one without members gets the member ``empty``."""
        filled = [row or (empty,) for row in rows]
        lengths = _numbers(map(len, filled))
        return cls(_numbers(member for row in filled for member in row), np.cumsum(lengths) - lengths)

    def latest(self, times: Floats) -> Floats:
        """(steps, rows): the latest of each row's members in each step, given ``times`` of shape (steps, tasks + 1)."""
        if not len(self.starts):
            return np.empty((len(times), 0))
        latest: Floats = np.maximum.reduceat(times.take(self.members, axis=1), self.starts, axis=1)
        return latest


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A task graph as arrays; the number after the last task stands for no task."""

    tasks: int
    kind: Numbers
    kinds: tuple[str, ...]
    sort: Numbers
    sorts: tuple[tuple[str, str], ...]
    """(stage, kind)"""
    device: Numbers
    devices: tuple[str, ...]
    place: Numbers
    """With an entry for no task."""
    places: tuple[tuple[str, str], ...]
    """(stage, device) of everything that computes, and a stage for each device that computes nothing."""
    home: Numbers
    """For each device the place of its first stage."""
    reads: Segments
    fed: Numbers
    fed_reads: Segments
    copies: Numbers
    route: Numbers
    """Of each of ``copies``, by its position there."""
    routes: tuple[tuple[str, str], ...]
    """(source device, destination device)"""
    copy_rows: Numbers
    """(copy lanes, most copies of a lane), filled up with no task."""
    compute: Numbers
    """(devices, most compute tasks of a device), filled up with no task."""
    forwards: Numbers
    releases: Numbers
    """The tasks that end a micro-batch's life at a stage; none where nothing is kept for a backward."""
    stage: Numbers
    stages: int

    @classmethod
    def of(cls, graph: TaskGraph) -> Plan:
        """The plan of ``graph``."""
        tasks, count = graph.tasks, len(graph.tasks)
        copies = [task for task in tasks if task.source is not None]
        on = [graph.devices.index(lane.device) for lane in graph.lanes]
        device = _numbers(on[lane] for lane in graph.lane_of)
        kind, kinds = _positions(task.kind.value for task in tasks)
        sort, sorts = _positions((str(task.stage), task.kind.value) for task in tasks)
        home, homes = _positions((_first_stage(graph, k), name) for k, name in enumerate(graph.devices))
        place, places = _positions(((str(task.stage), task.lane.device) for task in tasks), homes)
        route, routes = _positions((_source_device(graph, task), task.lane.device) for task in copies)
        fed = _fed(graph, copies)
        return cls(
            tasks=count,
            kind=kind,
            kinds=kinds,
            sort=sort,
            sorts=sorts,
            device=device,
            devices=graph.devices,
            place=np.append(place, 0),
            places=places,
            home=home,
            reads=Segments.of(graph.dependencies, count),
            fed=_numbers(fed),
            fed_reads=Segments.of([graph.dependencies[number] for number in fed], count),
            copies=_numbers(task.number for task in copies),
            route=route,
            routes=routes,
            copy_rows=_padded(_copy_rows(graph), count),
            compute=_rows(graph, device),
            forwards=_numbers(task.number for task in tasks if task.kind is TaskKind.FORWARD),
            releases=_numbers(task.number for task in tasks if graph.training and task.kind in graph.releasing),
            stage=_numbers(task.stage for task in tasks),
            stages=graph.shape.stages,
        )


class Plans:
    """Plans and ideals by graph, kept as long as their graph is.

    For any thread: two that ask at once may make the same plan twice.
    """

    def __init__(self) -> None:
        self._plans: WeakKeyDictionary[TaskGraph, Plan] = WeakKeyDictionary()
        self._ideals: WeakKeyDictionary[TaskGraph, float] = WeakKeyDictionary()

    def of(self, graph: TaskGraph) -> Plan:
        """The plan of ``graph``; making one takes about 3 µs per task, the first time."""
        plan = self._plans.get(graph)
        if plan is None:
            plan = self._plans[graph] = Plan.of(graph)
        return plan

    def ideal_bubble(self, graph: TaskGraph, *, make: bool) -> float | None:
        """The bubble of ``graph`` with even stages and no cost of copies; ``None`` if it is not known.

        It is found by a simulation (15 µs per task, the first time) if ``make``, for graphs that are not too large.
        """
        ideal = self._ideals.get(graph)
        if ideal is None and make and len(graph.tasks) <= MOST_SIMULATED:
            try:
                ideal = self._ideals[graph] = report(simulate(graph)).bubble_ratio
            except AsyncpipeError:
                # A rule that answers as it likes fails its steps; it must not fail a scrape.
                return None
        return ideal


def summed(values: Floats, position: Numbers, length: int) -> Floats:
    """For each of ``length`` positions the sum of the ``values`` there."""
    return np.bincount(position, values, length).astype(np.float64, copy=False)


def _numbers(values: Iterable[int]) -> Numbers:
    return np.fromiter(values, np.intp)


def _positions(labels: Iterable[_Label], known: Sequence[_Label] = ()) -> tuple[Numbers, tuple[_Label, ...]]:
    """The position of each label among the different ones, those ``known`` first, and these in their order."""
    seen = {label: position for position, label in enumerate(known)}
    found = _numbers(seen.setdefault(label, len(seen)) for label in labels)
    return found, tuple(seen)


def _first_stage(graph: TaskGraph, device: int) -> str:
    """The first stage on a device; stage 0 where there is none."""
    return str(graph.placement.index(device) if device in graph.placement else 0)


def _source_device(graph: TaskGraph, copy: Task) -> str:
    assert copy.source is not None
    return graph.devices[graph.placement[copy.source]]


def _fed(graph: TaskGraph, copies: Iterable[Task]) -> list[int]:
    """The tasks that read at least one copy."""
    numbers = {task.number for task in copies}
    return [number for number, reads in enumerate(graph.dependencies) if not numbers.isdisjoint(reads)]


def _rows(graph: TaskGraph, device: Numbers) -> Numbers:
    """The compute tasks of each device in a row of its own; short rows end in the number after the last task."""
    computes = np.fromiter((lane.queue is Queue.COMPUTE for lane in graph.lanes), np.bool_)[_numbers(graph.lane_of)]
    rows = [np.flatnonzero(computes & (device == k)) for k in range(len(graph.devices))]
    return _padded(rows, len(graph.tasks))


def _copy_rows(graph: TaskGraph) -> list[Numbers]:
    """The copies of each copy lane."""
    lane_of = _numbers(graph.lane_of)
    return [np.flatnonzero(lane_of == k) for k, lane in enumerate(graph.lanes) if lane.queue is not Queue.COMPUTE]


def _padded(rows: Sequence[Numbers], empty: int) -> Numbers:
    """``rows`` as one array, short ones filled up with ``empty``."""
    padded = np.full((len(rows), max([1, *map(len, rows)])), empty, np.intp)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return padded
