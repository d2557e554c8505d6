"""What the fold needs of a task graph, as arrays: made once for a graph and used for each of its steps.

An array maps the number of a task to the position of its labels in a tuple, or lists numbers of tasks::

    kind    task ──▶ kinds     "F", "B", …              reads   task ──▶ the tasks that it depends on
    sort    task ──▶ sorts     (stage, kind)            compute device ──▶ its compute tasks
    place   task ──▶ places    (stage, device)          copies  the copies, with their route ──▶ routes (src, dst)
    device  task ──▶ devices
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncpipe.core.graph.task import Lane, Queue, Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import COPY_KINDS, TaskKind

__all__ = ["Floats", "GraphArrays", "Numbers", "Segments", "in_order", "summed"]

Floats = NDArray[np.float64]
Numbers = NDArray[np.intp]

HOST = "host"
"""Where offloaded activations are, as a label."""

_Label = TypeVar("_Label", bound=Hashable)


class Segments:
    """Rows of different lengths in one array; a row without members has the member ``empty``."""

    def __init__(self, rows: Iterable[Sequence[int]], empty: int) -> None:
        filled = [row or (empty,) for row in rows]
        lengths = _numbers(map(len, filled))
        self._members = _numbers(member for row in filled for member in row)
        self._starts = np.cumsum(lengths) - lengths

    def latest(self, times: Floats) -> Floats:
        """(steps, rows): the latest of each row's members in each step, given ``times`` of shape (steps, tasks + 1)."""
        latest: Floats = np.maximum.reduceat(times.take(self._members, axis=1), self._starts, axis=1)
        return latest


class GraphArrays:
    """A task graph as arrays. The number after that of the last task means "no task". Nothing changes them."""

    def __init__(self, graph: TaskGraph) -> None:
        tasks, count = graph.tasks, len(graph.tasks)
        copies = [task for task in tasks if task.kind in COPY_KINDS]
        devices = graph.own_devices
        on = [devices.index(lane.device) for lane in graph.lanes]
        self.kind, self.kinds = _positions(task.kind.value for task in tasks)
        self.sort, self.sorts = _positions((str(task.stage), task.kind.value) for task in tasks)
        """(stage, kind)"""
        self.device = _numbers(on[lane] for lane in graph.lane_of)
        self.devices = tuple((device,) for device in devices)
        numbers = [graph.devices.index(device) for device in devices]
        firsts = [graph.placement.index(k) if k in graph.placement else 0 for k in numbers]
        self.home, homes = _positions(zip(map(str, firsts), devices, strict=True))
        """For each device the place of its first stage; of stage 0 where there is none."""
        place, self.places = _positions(((str(task.stage), task.lane.device) for task in tasks), homes)
        """(stage, device) of everything that computes, and a stage for each device that computes nothing."""
        self.place = np.append(place, 0)
        """Also has an entry for "no task"."""
        self.reads = Segments((graph.read_by(number) for number in range(count)), count)
        self.copies = _numbers(task.number for task in copies)
        self.route, self.routes = _positions(_route(graph, task) for task in copies)
        """The route of each of ``copies``, in their order: (source, destination), a device or the host."""
        self.copy_rows = _lane_rows(graph, lambda lane: lane.queue is not Queue.COMPUTE)
        """(copy lanes, most copies of a lane), filled up with "no task"."""
        self.compute = _lane_rows(graph, lambda lane: lane.queue is Queue.COMPUTE)
        """(devices, most compute tasks of a device), filled up with "no task"."""


def _route(graph: TaskGraph, task: Task) -> tuple[str, str]:
    here = task.lane.device
    if task.kind is TaskKind.COPY:
        assert task.source is not None
        return graph.devices[graph.placement[task.source]], here
    return (here, HOST) if task.kind is TaskKind.OFFLOAD else (HOST, here)


def summed(values: Floats, position: Numbers, length: int) -> Floats:
    """For each of ``length`` positions the sum of the ``values`` there."""
    return np.bincount(position, values, length).astype(np.float64, copy=False)


def in_order(rows: Numbers, started: Floats, ended: Floats) -> tuple[Numbers, Numbers, Floats, Floats]:
    """The tasks of lanes in the order of their starts, as four arrays of shape (steps, lanes, tasks of a lane).

    ``rows`` are the task numbers of each lane; ``started`` and ``ended`` have the shape (steps, tasks + 1). The arrays
    are the task numbers, their positions in ``ended.ravel()``, and when the lane was free before and after each task.
    """
    order = np.argsort(started[:, rows], axis=2, kind="stable")
    tasks = np.take_along_axis(rows[np.newaxis], order, axis=2)
    cells = tasks + ended.shape[1] * np.arange(len(ended))[:, np.newaxis, np.newaxis]
    after = np.maximum(np.maximum.accumulate(ended.ravel()[cells], axis=2), 0.0)
    before = np.zeros_like(after)
    before[:, :, 1:] = after[:, :, :-1]
    return tasks, cells, before, after


def _numbers(values: Iterable[int]) -> Numbers:
    return np.fromiter(values, np.intp)


def _positions(labels: Iterable[_Label], known: Sequence[_Label] = ()) -> tuple[Numbers, tuple[_Label, ...]]:
    """The position of each label in the tuple of distinct labels, and that tuple, which begins with ``known``."""
    seen = {label: position for position, label in enumerate(known)}
    found = _numbers(seen.setdefault(label, len(seen)) for label in labels)
    return found, tuple(seen)


def _lane_rows(graph: TaskGraph, chosen: Callable[[Lane], bool]) -> Numbers:
    """A row of task numbers for each chosen lane; short rows are filled up with "no task"."""
    lane_of = _numbers(graph.lane_of)
    rows = [np.flatnonzero(lane_of == number) for number, lane in enumerate(graph.lanes) if chosen(lane)]
    padded = np.full((len(rows), max([1, *map(len, rows)])), len(graph.tasks), np.intp)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return padded
