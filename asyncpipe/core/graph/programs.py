"""Programs: what each device runs in one step, in order, where the graph leaves nothing to decide.

The tasks of an ordered schedule have numbers in which every dependency comes before its dependents. So devices that
run their tasks in the order of these numbers, and wait at each for what other devices still owe it, never wait in a
circle: the unfinished task of the lowest number can always run. A copy has its number just before the task that needs
it, so no device waits for a value that it has no use for yet.

What a task needs from its own device is ready when its turn comes; ``Program`` says what it needs from others.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, TypeAlias

from asyncpipe.core.graph.task_graph import TaskGraph

__all__ = ["TaskPlace", "Program", "Programs", "programs"]


TaskPlace: TypeAlias = tuple[int, int]
"""A task: (position of its program in ``Programs.programs``, position in that program)."""


class Program(NamedTuple):
    """The tasks of one device in one step. Lists are by position in the program."""

    device: int
    """The index of the device in the graph."""
    tasks: tuple[int, ...]
    """The numbers of the tasks, in the order in which they run."""
    awaits: tuple[int, ...]
    """For how many tasks of other devices, and gates, each one waits."""
    releases: tuple[tuple[TaskPlace, ...], ...]
    """The tasks of other devices that wait for each one."""


class Programs(NamedTuple):
    """What the devices run in one step."""

    programs: tuple[Program, ...]
    """Of each device that has a task."""
    gates: tuple[TaskPlace, ...]
    """By gate of the graph, the task that waits for it."""


def programs(graph: TaskGraph) -> Programs:
    """The programs of all devices. The graph must have an order, that is no rule."""
    assert graph.rule is None
    device_of = [graph.placement[task.stage] for task in graph.tasks]
    orders: dict[int, list[int]] = {}
    for number, device in enumerate(device_of):
        orders.setdefault(device, []).append(number)
    places = {
        number: (program, position)
        for program, order in enumerate(orders.values())
        for position, number in enumerate(order)
    }
    closed = Counter(graph.gates)
    made = tuple(
        Program(
            device=device,
            tasks=tuple(order),
            awaits=tuple(
                sum(device_of[before] != device for before in graph.dependencies[number]) + closed[number]
                for number in order
            ),
            releases=tuple(tuple(places[after] for after in graph.remote_dependents[number]) for number in order),
        )
        for device, order in orders.items()
    )
    return Programs(made, tuple(places[gated] for gated in graph.gates))
