"""What the fold needs of a task graph, as arrays: made once for a graph and used for each of its steps.

An array maps the number of a task to the position of its labels in a tuple, or lists numbers of tasks::

    kind    task ──▶ kinds     "F", "B", …              reads   task ──▶ the tasks that it depends on
    sort    task ──▶ sorts     (stage, kind)            fed     the tasks that read copies
    place   task ──▶ places    (stage, device)          compute device ──▶ its compute tasks
    device  task ──▶ devices                            copies  the copies, with their route ──▶ routes (src, dst)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from asyncpipe.core.graph.task import Lane, Queue, Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.errors import AsyncpipeError

__all__ = ["Floats", "GraphArrays", "GraphArraysCache", "Numbers", "Segments", "summed"]

Floats = NDArray[np.float64]
Numbers = NDArray[np.intp]

MOST_SIMULATED = 50_000
"""The ideal bubble of graphs with more tasks than this is not computed."""

_Label = TypeVar("_Label", bound=Hashable)


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Rows of different lengths, none of them empty, in one array."""

    members: Numbers
    starts: Numbers

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]], empty: int) -> Segments:
        """The segments of ``rows``; a row without members gets the member ``empty``."""
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
class GraphArrays:
    """A task graph as arrays. The number after that of the last task means "no task"."""

    kind: Numbers
    kinds: tuple[str, ...]
    sort: Numbers
    sorts: tuple[tuple[str, str], ...]
    """(stage, kind)"""
    device: Numbers
    devices: tuple[str, ...]
    place: Numbers
    """Also has an entry for "no task"."""
    places: tuple[tuple[str, str], ...]
    """(stage, device) of everything that computes, and a stage for each device that computes nothing."""
    home: Numbers
    """For each device the place of its first stage."""
    reads: Segments
    fed: Numbers
    fed_reads: Segments
    copies: Numbers
    route: Numbers
    """The route of each of ``copies``, in their order."""
    routes: tuple[tuple[str, str], ...]
    """(source device, destination device)"""
    copy_rows: Numbers
    """(copy lanes, most copies of a lane), filled up with "no task"."""
    compute: Numbers
    """(devices, most compute tasks of a device), filled up with "no task"."""
    forwards: Numbers
    releases: Numbers
    """The tasks after which a stage holds a micro-batch no longer; none where nothing is kept for a backward."""
    stage: Numbers
    stages: int

    @classmethod
    def of(cls, graph: TaskGraph) -> GraphArrays:
        """The arrays of ``graph``."""
        tasks, count = graph.tasks, len(graph.tasks)
        copies = [task for task in tasks if task.source is not None]
        copied = {task.number for task in copies}
        fed = [number for number, reads in enumerate(graph.dependencies) if not copied.isdisjoint(reads)]
        on = [graph.devices.index(lane.device) for lane in graph.lanes]
        kind, kinds = _positions(task.kind.value for task in tasks)
        sort, sorts = _positions((str(task.stage), task.kind.value) for task in tasks)
        home, homes = _positions((_first_stage(graph, k), name) for k, name in enumerate(graph.devices))
        place, places = _positions(((str(task.stage), task.lane.device) for task in tasks), homes)
        route, routes = _positions((_source_device(graph, task), task.lane.device) for task in copies)
        return cls(
            kind=kind,
            kinds=kinds,
            sort=sort,
            sorts=sorts,
            device=_numbers(on[lane] for lane in graph.lane_of),
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
            copy_rows=_lane_rows(graph, lambda lane: lane.queue is not Queue.COMPUTE),
            compute=_lane_rows(graph, lambda lane: lane.queue is Queue.COMPUTE),
            forwards=_numbers(task.number for task in tasks if task.kind is TaskKind.FORWARD),
            releases=_numbers(task.number for task in tasks if graph.training and task.kind in graph.releasing),
            stage=_numbers(task.stage for task in tasks),
            stages=graph.shape.stages,
        )


class GraphArraysCache:
    """The arrays and the ideal bubble of each graph, kept as long as the graph lives.

    Any thread may call it; two threads that ask at once may both compute the same arrays.
    """

    def __init__(self) -> None:
        self._arrays: WeakKeyDictionary[TaskGraph, GraphArrays] = WeakKeyDictionary()
        self._ideals: WeakKeyDictionary[TaskGraph, float] = WeakKeyDictionary()

    def of(self, graph: TaskGraph) -> GraphArrays:
        """The arrays of ``graph``; the first call takes about 3 µs a task."""
        arrays = self._arrays.get(graph)
        if arrays is None:
            arrays = self._arrays[graph] = GraphArrays.of(graph)
        return arrays

    def ideal_bubble(self, graph: TaskGraph, *, make: bool) -> float | None:
        """The bubble of ``graph`` with even stages and free copies; ``None`` if it is not known.

        With ``make`` it is found by a simulation (15 µs a task, the first time), unless the graph is too large.
        """
        ideal = self._ideals.get(graph)
        if ideal is None and make and len(graph.tasks) <= MOST_SIMULATED:
            try:
                ideal = self._ideals[graph] = report(simulate(graph)).bubble_ratio
            except AsyncpipeError:
                # A user's faulty rule fails the steps that use it; it must not fail a scrape as well.
                return None
        return ideal


def summed(values: Floats, position: Numbers, length: int) -> Floats:
    """For each of ``length`` positions the sum of the ``values`` there."""
    return np.bincount(position, values, length).astype(np.float64, copy=False)


def _numbers(values: Iterable[int]) -> Numbers:
    return np.fromiter(values, np.intp)


def _positions(labels: Iterable[_Label], known: Sequence[_Label] = ()) -> tuple[Numbers, tuple[_Label, ...]]:
    """The position of each label in the tuple of distinct labels, and that tuple, which begins with ``known``."""
    seen = {label: position for position, label in enumerate(known)}
    found = _numbers(seen.setdefault(label, len(seen)) for label in labels)
    return found, tuple(seen)


def _first_stage(graph: TaskGraph, device: int) -> str:
    """The first stage on a device; stage 0 where there is none."""
    return str(graph.placement.index(device) if device in graph.placement else 0)


def _source_device(graph: TaskGraph, copy: Task) -> str:
    assert copy.source is not None
    return graph.devices[graph.placement[copy.source]]


def _lane_rows(graph: TaskGraph, chosen: Callable[[Lane], bool]) -> Numbers:
    """A row of task numbers for each chosen lane; short rows are filled up with "no task"."""
    lane_of = _numbers(graph.lane_of)
    rows = [np.flatnonzero(lane_of == number) for number, lane in enumerate(graph.lanes) if chosen(lane)]
    padded = np.full((len(rows), max([1, *map(len, rows)])), len(graph.tasks), np.intp)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return padded
